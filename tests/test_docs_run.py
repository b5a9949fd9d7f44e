"""Every example in the README and in docs/ runs, in order, in an empty directory."""

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from child_processes import run_python
from netns import two_hosts

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IN_TEST_VLLM = {"vllm.md"}
"""Pages that need a vLLM: `make test-vllm` runs their examples."""
LINK = re.compile(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize(
    "page",
    [each for each in PAGES if each.name not in IN_TEST_VLLM],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_examples_of_a_page_run(page, tmp_path):
    """Python blocks of a page are one program; the shell blocks stand where they stand in it.

    `torchrun` is tests/torchrun.py; test_save_and_load_by_ranks.py starts the real one.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    torchrun = commands / "torchrun"
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/torchrun.py "$@"\n')
    torchrun.chmod(0o700)
    place = tmp_path / "empty"
    place.mkdir()
    program = ["import os, subprocess"]
    for language, text in BLOCK.findall(page.read_text()):
        if language == "python":
            program.append(text)
        else:
            program.append(f"subprocess.run(['bash', '-e', '-c', {text!r}], check=True)")
    path = [str(commands), os.path.dirname(sys.executable), os.environ["PATH"]]
    env = {**os.environ, "PATH": os.pathsep.join(path)}
    with network_for(program) as prefix:
        done = run_python("\n".join(program), prefix=prefix, cwd=place, env=env, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def network_for(program):
    """Yield the words that start a program in a network of its own, if it listens at a port."""
    if any("tcp://127.0.0.1:" in each for each in program):
        with two_hosts() as hosts:
            yield hosts.a.prefix
    else:
        yield ()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page):
    for link in LINK.findall(page.read_text()):
        assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_readme_has_examples_at_all():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 2
