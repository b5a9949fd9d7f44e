"""Runs a function on several ranks: real processes, forked once torch and Paddle are imported.

    run_ranks(NUM_RANKS, FILE, FUNCTION, ARGUMENT..., framework=FRAMEWORK)

Each rank has the process group of FRAMEWORK (torch or paddle, both on gloo) and calls
FUNCTION(rank, num_ranks, *arguments). The exit code is that of the first rank that failed;
a rank that dies of a signal does not count, tests kill some on purpose. With 0 ranks the
function is called once, with its arguments alone, and launches ranks itself; framework "numpy"
is then a process that has imported nothing large, and forks quickly.

Importing torch takes longer than most tests do. So a nursery, `python tests/rank_processes.py FRAMEWORK`,
imports it once for all tests of a pytest worker and forks itself for every call.
"""

import atexit
import importlib.util
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from child_processes import LIMIT

PRELOADED = {
    "torch": (
        "numpy", "pytest", "torch.distributed.tensor.parallel", "torch.distributed.fsdp",
        "torch.distributed.checkpoint.state_dict", "torch._dynamo",
    ),
    "paddle": ("numpy", "pytest", "torch.distributed", "paddle.distributed"),
    "numpy": ("numpy", "pytest", "flyweight.cli"),
}  # fmt: skip


def run_ranks(
    num_ranks, file, function, *arguments, framework="torch", timeout=4 * LIMIT, check=True
):
    """Run a function of a test file on ranks; return the finished process with its output."""
    words = [str(num_ranks), framework, str(file), function, *map(str, arguments)]
    nursery = _nurseries.get(framework) or Nursery(framework)
    done = nursery.run(words, timeout)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


class Nursery:
    """A process that has imported a framework, and runs each call in a fork of itself.

    It has one thread, and has never looked for a GPU: a fork of it is as good as a new process.
    """

    def __init__(self, framework):
        path = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        # Looking for GPUs the usual way makes a process unfit for forking ranks that use them.
        self._env = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        self._framework = framework
        self._process = subprocess.Popen(
            [sys.executable, __file__, framework],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
            env={**os.environ, **self._env},
        )  # fmt: skip
        _nurseries[framework] = self

    def run(self, words, timeout):
        child = None
        with tempfile.TemporaryDirectory() as place:
            outputs = [Path(place, name) for name in ("stdout", "stderr")]
            request = {
                "words": words, "outputs": [*map(str, outputs)], "cwd": os.getcwd(),
                "env": {**os.environ, **self._env},
            }  # fmt: skip
            deadline = time.monotonic() + timeout
            try:
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                child = int(self._line(deadline))
                code = int(self._line(deadline))
            except BaseException as error:  # the next call must not read the answer to this one
                if child is not None:
                    with suppress(ProcessLookupError):
                        os.killpg(child, signal.SIGKILL)
                self.close()
                if isinstance(error, TimeoutError):
                    told = [each.read_text() if each.exists() else "" for each in outputs]
                    raise subprocess.TimeoutExpired(words, timeout, *told) from None
                raise
            return subprocess.CompletedProcess(words, code, *(each.read_text() for each in outputs))

    def _line(self, deadline):
        line = b""
        while not line.endswith(b"\n"):
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            more = self._process.stdout.read(1)
            assert more, f"the nursery of {self._framework} has ended"
            line += more
        return line

    def close(self):
        _nurseries.pop(self._framework, None)
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


_nurseries = {}


@atexit.register
def _close_nurseries(owner=os.getpid()):  # noqa: B008
    if os.getpid() == owner:  # and not a fork of it
        for each in list(_nurseries.values()):
            each.close()


def serve(framework):
    """Fork for each line that comes, and answer with the fork's number and then its exit code."""
    import flyweight

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what frameworks print when they are imported answers nobody
    # Where there is a GPU only what test files import anyway: the rest might look for it.
    has_gpu = os.path.exists("/dev/nvidiactl")
    for name in ("numpy", "pytest", framework) if has_gpu else PRELOADED[framework]:
        importlib.import_module(name)
    for name in () if has_gpu else flyweight.__all__:
        getattr(flyweight, name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, a fork has one"
    for line in sys.stdin.buffer:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            run_here(request)
        print(child, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers)


def run_here(request):
    """Be the process that was asked for, to its end."""

    def run():
        os.setsid()
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(request["outputs"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
        return main(*request["words"])

    end_with(run)


def end_with(run):
    """End this fork with the exit code that `run` returns; 1 if it raises."""
    code = 1
    try:
        code = run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_ports(count):
    """Return ports that hardly anybody takes meanwhile: the kernel gives out none below 32768."""
    found, port = [], 10_000 + secrets.randbelow(20_000)
    while len(found) < count:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        port = 10_000 + (port - 10_000 + 1) % 20_000
    return found


def join_torch(rank, num_ranks, ports):
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(ports[0]),
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
    )
    dist.init_process_group("gloo")


def join_paddle(rank, num_ranks, ports):
    import paddle
    import paddle.distributed as dist

    ends = [f"127.0.0.1:{port}" for port in ports[1 : 1 + num_ranks]]
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank), PADDLE_TRAINERS_NUM=str(num_ranks), PADDLE_TRAINER_ENDPOINTS=",".join(ends),
        PADDLE_CURRENT_ENDPOINT=ends[rank], PADDLE_MASTER=f"127.0.0.1:{ports[0]}", PADDLE_DISTRI_BACKEND="gloo",
    )  # fmt: skip
    paddle.set_device("cpu")
    dist.init_parallel_env()
    dist.barrier()


def launch(num_ranks, framework, call):
    """Fork ranks that join the framework's process group and then `call(rank, num_ranks)`.

    Returns their exit codes, minus the number of the signal for those that died of one.
    """
    ports = free_ports(1 + num_ranks)
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                {"torch": join_torch, "paddle": join_paddle}[framework](rank, num_ranks, ports)
                call(rank, num_ranks)
                code = 0
            except BaseException:
                print(f"rank {rank}:", file=sys.stderr)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(num_ranks, framework, file, function, *arguments):
    spec = importlib.util.spec_from_file_location("worker", file)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    if int(num_ranks) == 0:  # the function launches ranks itself, round after round
        getattr(worker, function)(*arguments)
        return 0
    codes = launch(
        int(num_ranks),
        framework,
        lambda rank, count: getattr(worker, function)(rank, count, *arguments),
    )
    return next((code for code in codes if code > 0), 0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
