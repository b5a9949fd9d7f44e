"""The guide and the example run, as they are, with a real vLLM."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from vllm_processes import ENVIRONMENT, OPTIONS, START_SECONDS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_of_the_guide_run(tmp_path):
    """`vllm serve MODEL` is the same server with the options that a small machine needs."""
    words = " ".join(
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in OPTIONS.items()
    )
    commands = tmp_path / "bin"
    commands.mkdir()
    server = f'exec {sys.executable} -m vllm.entrypoints.openai.api_server --model "$2" {words}'
    (commands / "vllm").write_text(
        f'#!/bin/sh\n{server} "${{@:3}}"\n'.replace("/bin/sh", "/bin/bash")
    )
    (commands / "flyweight").write_text(f'#!/bin/sh\nexec {sys.executable} -m flyweight.cli "$@"\n')
    for each in commands.iterdir():
        each.chmod(0o700)
    place = tmp_path / "empty"
    tiny_models.make(place / "policy", 1)
    program = ["import subprocess"]
    blocks = BLOCK.findall((ROOT / "docs" / "guides" / "vllm.md").read_text())
    for language, text in blocks:
        program.append(
            text
            if language == "python"
            else f"subprocess.run(['bash', '-e', '-c', {text!r}], check=True)"
        )
    assert len(blocks) > 3
    path = os.pathsep.join([str(commands), os.environ["PATH"]])
    log = tmp_path / "log"
    with open(log, "wb") as output:  # a file: the server keeps it open, and a pipe would not end
        process = subprocess.Popen(
            [sys.executable, "-c", "\n".join(program)],
            cwd=place,
            env={**os.environ, **ENVIRONMENT, "PATH": path},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = process.wait(START_SECONDS)
    finally:
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)
    output = log.read_text()
    assert code == 0, output[-5000:]
    assert '"weight_version":"42"' in output
    assert "State.SERVING 4" in output or "SERVING 4" in output


@pytest.mark.campaign
def test_the_example_learns_and_a_fresh_vllm_answers_the_same():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm_rl.py", "--steps", "4", "--checks", "2"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("yes  vLLM, freshly loaded from snapshot") == 2
    assert "yes  the reward rose" in done.stdout
