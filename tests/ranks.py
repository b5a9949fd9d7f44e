"""Runs a function on several ranks: real processes, forked once torch and Paddle are imported.

    python tests/ranks.py NUM_RANKS FRAMEWORK FILE FUNCTION [ARGUMENT...]

Each rank has the process group of FRAMEWORK (torch or paddle, both on gloo) and calls
FUNCTION(rank, num_ranks, *arguments). The exit code is that of the first rank that failed;
a rank that dies of a signal does not count, tests kill some on purpose. With 0 ranks the
function is called once, with its arguments alone, and launches ranks itself.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path


def run_ranks(num_ranks, file, function, *arguments, framework="torch", timeout=90, check=True):
    """Run a function of a test file on ranks; return the finished process with its output."""
    command = [
        sys.executable,
        __file__,
        str(num_ranks),
        framework,
        str(file),
        function,
        *map(str, arguments),
    ]
    path = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # Looking for GPUs the usual way makes a process unfit for forking ranks that use them.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


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
    if framework == "torch":
        pass
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
    sys.exit(main(*sys.argv[1:]))
