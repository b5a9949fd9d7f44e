"""Trainers of a real vLLM server: sharded by FSDP2, and controllers that are killed."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from vllm_processes import HERE, START_SECONDS, free_port

from child_processes import LIMIT
from flyweight.engines.vllm import VllmEngine
from live.certificates import made_by_one_authority


@pytest.mark.parametrize("over", [pytest.param("unix", marks=pytest.mark.campaign), "tcp"])
def test_a_sharded_trainer_publishes_without_gathering_and_encrypted_over_tcp(
    server, models, answers, tmp_path, over
):
    token_file, tls = "", None
    address = f"unix:{tmp_path}/policy"
    if over == "tcp":
        token_file, address = str(tmp_path / "token"), f"tcp://127.0.0.1:{free_port()}"
        Path(token_file).write_text("a-token-of-some-length")
        Path(token_file).chmod(0o600)
        own, authority = map(str, made_by_one_authority(tmp_path / "tls", "127.0.0.1"))
        tls = {"certificate": own, "key": own, "authority": authority}
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", str(free_port()), str(HERE / "sharded_trainer.py")]
    given = [
        str(server.port),
        address,
        token_file,
        json.dumps(tls),
        str(models / "A"),
        str(models / "B"),
    ]
    done = subprocess.run(
        words + given,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = [json.loads(each[5:]) for each in done.stdout.splitlines() if each[:5] == "FOUND"]
    assert [each["error"] for each in found] == ["None", "None"]
    assert [each["tokens"] for each in found] == [answers["B"], answers["A"]]


CONTROLLER = """
import sys
from flyweight.engines.vllm import VllmEngine
engine = VllmEngine(sys.argv[1], sys.argv[2])
print("ready", flush=True)
engine.update(int(sys.argv[3]))
print("updated", flush=True)
"""


ROUTES = ("/init", "/pause", "/start_weight", "/update_weights", "/finish_weight", "/resume")
QUICK = [
    ("/init", "after"),
    ("/pause", "after"),
    ("/update_weights", "after"),
    ("/finish_weight", "after"),
]
NOT_PAUSED = [("/init", "before"), ("/init", "after"), ("/pause", "before"), ("/resume", "after")]
REST = [each for each in product(ROUTES, ("before", "after")) if each not in QUICK]


@pytest.mark.parametrize(
    ("route", "when"),
    QUICK + [pytest.param(*each, marks=pytest.mark.campaign) for each in REST],
)
def test_a_controller_that_is_killed_at_any_call_leaves_what_the_next_one_heals(
    server, trainer, address, answers, route, when
):
    VllmEngine(server.address, address).update(old := trainer.becomes("A"))
    new = trainer.becomes("B")
    dies = f"""
import os, signal
from flyweight.engines.vllm_control import HttpControl
call = HttpControl._call
def dying(self, method, path, *args, **kwargs):
    is_there = path.startswith({route!r})
    if is_there and {when == "before"}:
        os.kill(os.getpid(), signal.SIGKILL)
    found = call(self, method, path, *args, **kwargs)
    if is_there:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
HttpControl._call = dying
"""
    words = [sys.executable, "-c", dies + CONTROLLER, server.address, address, str(new)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stdout) == (-9, "ready\n"), done.stderr[-3000:]
    is_named = (route, when) == ("/finish_weight", "after") or route == "/resume"
    assert server.version() == str(new if is_named else old)
    assert server.is_paused() == ((route, when) not in NOT_PAUSED)
    if not server.is_paused():
        loaded = (route, when) == ("/resume", "after")
        assert server.tokens() == answers["B" if loaded else "A"]
    second = VllmEngine(server.address, address)
    assert second.update(new).version == new
    assert (server.tokens(), server.version()) == (answers["B"], str(new))
    assert not server.is_paused()
