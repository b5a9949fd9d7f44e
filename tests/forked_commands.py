"""Runs a document's program in forks of one process that has imported what its commands need.

`python FILE`, `python -c CODE`, `flyweight ...` and `torchrun ...` come first in the program's PATH. Each
is a small script that sends its words, environment, directory and standard files to the process,
which forks to do the work; signals and exit codes go through. Everything else, and Python with other words,
is the real one. To import torch forty times takes longer than all the examples do.
"""

import argparse
import atexit
import json
import os
import pickle
import runpy
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from rank_processes import free_ports

SCRIPT = """#!{python} -IS
import json, os, signal, socket, sys
name, *words = os.path.basename(sys.argv[0]), *sys.argv[1:]
is_known = bool(words) and (words[0].endswith(".py") or words[0] == "-c")
has_files = len(os.listdir("/proc/self/fd")) > 4  # three, and that of the directory itself
if name == "python" and (has_files or not is_known):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
is_deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as what a shell starts with "&"
request = [name, words, dict(os.environ), os.getcwd(), is_deaf]
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
os._exit(int(server.recv(10) or 1))
"""


def run_document(program, place, host):
    """Run a program in a directory, on a host of `netns` if there is one; raise if it fails."""
    if host:
        pickle.loads(bytes.fromhex(host)).enter()
        del os.environ["FLYWEIGHT_HOST"]
    forget_tests()
    commands = tempfile.mkdtemp(prefix="fw")  # not TemporaryDirectory: every fork would remove it
    try:
        address = f"{commands}/server"
        for name in ("python", "flyweight", "torchrun"):
            script = Path(commands, name)
            script.write_text(SCRIPT.format(python=sys.executable, address=address))
            script.chmod(0o700)
        real = os.path.dirname(sys.executable)
        os.environ["PATH"] = os.pathsep.join([commands, real, os.environ["PATH"]])
        sys.executable = f"{commands}/python"
        with Server(address) as server:
            code = server.serve("python", [program], dict(os.environ), place)
    finally:
        shutil.rmtree(commands)
    assert code == 0, f"the document's program ended with {code}"


def forget_tests():
    """Let no example import a test's modules."""
    tests = str(Path(__file__).parent)
    sys.path[:] = [each for each in sys.path if each != tests]
    paths = os.environ.pop("PYTHONPATH", "").split(os.pathsep)
    if kept := [each for each in paths if each not in ("", tests)]:
        os.environ["PYTHONPATH"] = os.pathsep.join(kept)


class Server:
    """Forks for every command that is asked for."""

    def __init__(self, address):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(address)
        self._listener.listen(64)
        self._running = {}
        """The connection of each command that runs, by its process."""
        self._ended, wake = socket.socketpair()
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._files = [self._listener, self._ended, wake]

    def serve(self, *request):
        """Run a command and all that it asks for; return its exit code."""
        first = self._fork([*request, False], [0, 1, 2])
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._ended, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is self._ended:
                        self._ended.recv(4096)
                    elif not self._pass_signal(key.fileobj, key.data):
                        selector.unregister(key.fileobj)
                for pid, code in self._codes():
                    if pid == first:
                        return code
                    connection = self._running.pop(pid)
                    with suppress(OSError, KeyError):
                        selector.unregister(connection)
                    with suppress(OSError):
                        connection.send(str(code).encode())
                    connection.close()

    def _accept(self, selector):
        connection, _ = self._listener.accept()
        data, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if data:
            pid = self._fork(json.loads(data), files, connection)
            self._running[pid] = connection
            selector.register(connection, selectors.EVENT_READ, pid)
        else:  # a signal ended it at once
            connection.close()
        for each in files:
            os.close(each)

    def _pass_signal(self, connection, pid):
        """Send a command the signal that its script got; kill it if the script is gone."""
        with suppress(ConnectionError):
            if number := connection.recv(1):
                os.kill(pid, number[0])
                return True
        os.kill(pid, signal.SIGKILL)
        return False

    def _codes(self):
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                code = os.waitstatus_to_exitcode(found[1])
                yield found[0], code if code >= 0 else 128 - code

    def _fork(self, request, files, *connections):
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (*self._files, *self._running.values(), *connections):
                each.close()
            end_with(lambda: be(*request, files))
        return pid

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def be(name, words, environment, place, is_deaf, files):
    """Be the command, to its end."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        if file > 2:
            os.close(file)
    sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_deaf else signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    if name == "flyweight":
        from flyweight.cli import main

        sys.argv = ["flyweight", *words]
        main()
    elif name == "torchrun":
        sys.exit(torchrun(words))
    else:
        script, *sys.argv[1:] = words[words[0] == "-c" :]
        run_python(script, is_code=words[0] == "-c")


def run_python(script, *, is_code=False):
    if not is_code:
        sys.argv[0] = script
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        runpy.run_path(script, run_name="__main__")
        return
    sys.argv[0] = "-c"
    sys.path.insert(0, "")
    exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})


def torchrun(words):
    """Run a script as several ranks, each in a fork of its own; test_save_and_load_by_ranks.py starts
    the real one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    options = parser.parse_args(words)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]),
        WORLD_SIZE=str(options.nproc_per_node),
    )  # fmt: skip
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads, a fork has one"
    sys.argv = [options.script]
    ranks = [fork_rank(options.script, rank) for rank in range(options.nproc_per_node)]
    codes = [os.waitpid(child, 0)[1] for child in ranks]
    return int(any(codes))


def fork_rank(script, rank):
    child = os.fork()
    if child == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        end_with(lambda: run_python(script))
    return child


def end_with(run):
    """End this fork as the interpreter ends a program."""
    code = 0
    try:
        run()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = code or 120  # as Python's own
    finally:
        os._exit(code)
