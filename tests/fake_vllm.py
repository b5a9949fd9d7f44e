"""A stand-in for a vLLM server: its routes, and workers with our own replicas and updates.

The real one runs in tests/real_vllm. This one fails where a test wants it to.
"""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np

import flyweight as fw
from child_processes import LIMIT
from flyweight.adapters.loader import Loader
from flyweight.engines.background_update import BackgroundUpdate, MainThread
from flyweight.engines.vllm_control import _ROUTES
from flyweight.errors import FlyweightError, LifecycleError


class Worker:
    """One worker: what `vllm_worker.py` does, with a dict of arrays for a model."""

    def __init__(self, rank, num_ranks):
        self.rank, self.num_ranks = rank, num_ranks
        self.boot, self.is_open, self.model = f"boot {id(self)}", False, {}
        self.is_whole, self.connected_by = True, None
        self.main, self.update, self.replica = MainThread(), None, None
        self.loader = WorkerLoader(self)
        self.extra = {}
        """What its status says besides, or instead."""

    def begin(self, request):
        cancelled = request.get("cancel")
        if self.update is not None and cancelled in (None, self.update.id):
            self.update.cancel()
        if cancelled is not None:
            return

        def replica():
            by = request["address"], request["name"]
            if self.replica is None or by != self.connected_by:
                if self.replica is not None:
                    self.replica.close()
                options = {"rank": self.rank, "world_size": self.num_ranks}
                options["staging_bytes"] = request["staging_bytes"]
                self.replica = fw.Replica(self.loader, by[0], name=by[1], **options)
                self.connected_by = by
            if self.replica.version != request["held"]:
                self.replica.forget("others have written the weights")
            return self.replica

        self.update = BackgroundUpdate(
            request["update"],
            replica,
            self.main,
            last=self.update,
            version=request["version"],
            may_keep=request["may_keep"],
            verify=request["verify"],
            timeout_seconds=request["timeout_seconds"],
        )
        self.update.start()

    def status(self):
        self.main.run_waiting()
        update = {"state": "idle"} if self.update is None else self.update.status()
        held = None if self.replica is None else self.replica.version
        about = {
            "rank": self.rank, "balancing": "internal", "boot": self.boot,
            "is_open": self.is_open, "is_whole": self.is_whole, "held": held,
        }  # fmt: skip
        return {**about, **update, **self.extra}

    def load(self, id):
        if self.update is not None and self.update.id == id:
            with suppress(FlyweightError):  # the status says so
                self.update.complete()
                self.is_whole = True

    def close(self):
        if self.update is not None:
            self.update.join(LIMIT)
        if self.replica is not None:
            self.replica.close()


class WorkerLoader(Loader):
    def __init__(self, worker):
        self._worker, self.error = worker, None
        super().__init__(self._load, "numpy", "cpu")

    def _load(self, weights):
        def load():
            if self.error is not None:
                raise self.error
            self._worker.model = {name: array.copy() for name, array in weights}

        self._worker.update.call(load, is_load=True)


class FakeVllm:
    """A server on loopback; `faults` has what a route answers instead, as (status, body).

    As vLLM does, it shows the status of its first data parallel engine only.
    """

    def __init__(self, num_workers=1, routes=_ROUTES, num_engines=1):
        self.num_workers, self.num_engines = num_workers, num_engines
        self.routes, self.faults, self.calls = routes, {}, []
        self.version, self.is_paused = "default", False
        self._beginning = threading.Lock()
        self.changed, self.num_running = threading.Condition(), 0
        num_ranks = num_workers * num_engines
        self.workers = [Worker(rank, num_ranks) for rank in range(num_ranks)]
        handler = type("Handler", (_Handler,), {"vllm": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        # How often it looks whether it is to end.
        serve = {"poll_interval": 0.01}
        threading.Thread(target=self._server.serve_forever, kwargs=serve, daemon=True).start()

    def restart(self):
        """Lose everything, as a new process does."""
        with self._beginning:
            self._close_workers()
            self.workers = [Worker(each.rank, each.num_ranks) for each in self.workers]
            self.version, self.is_paused = "default", False

    def _close_workers(self):
        for each in self.workers:  # first all: a rank waits for what the others say
            if each.update is not None:
                each.update.cancel()
        for each in self.workers:
            each.close()

    @contextmanager
    def request(self, seconds):
        """Answer a request: wait while the engine is paused."""
        with self.changed:
            if not self.changed.wait_for(lambda: not self.is_paused, seconds):
                raise LifecycleError("the engine accepted no requests")
            self.num_running += 1
            version = int(self.version) if self.version.isdecimal() else None
        try:
            yield version
        finally:
            with self.changed:
                self.num_running -= 1
                self.changed.notify_all()

    def answer(self, path, query, body):
        match path:
            case "/openapi.json":
                return {"paths": dict.fromkeys(self.routes)}
            case "/version":
                return {"version": "0.1"}
            case "/metrics":
                return f'vllm:num_requests_running{{engine="0"}} {self.num_running}.0\n'
            case "/pause":
                with self.changed:
                    self.is_paused = True
                    if query["mode"] == ["abort"]:
                        self.num_running = 0
                    if query["mode"] == ["wait"]:
                        self.changed.wait_for(
                            lambda: not self.num_running or not self.is_paused, LIMIT
                        )
                return {}
            case "/resume":
                with self.changed:
                    self.is_paused = False
                    self.changed.notify_all()
                return {}
            case "/is_paused":
                return {"is_paused": self.is_paused}
            case "/get_world_size":
                return {
                    "world_size": len(self.workers)
                    if query["include_dp"] == ["true"]
                    else self.num_workers
                }
            case "/weight_info":
                return {"weight_version": self.version}
            case "/collective_rpc":
                found = [each.status() for each in self.workers]
                return {"results": found[: self.num_workers]}
            case "/init_weight_transfer_engine":
                with self._beginning:
                    for each in self.workers:
                        each.begin(body["init_info"])
                return {}
            case "/start_weight_update" | "/finish_weight_update":
                is_start = path == "/start_weight_update"
                assert all(each.is_open is not is_start for each in self.workers), "as vLLM raises"
                for each in self.workers:
                    each.is_open = is_start
                if not is_start and body["weight_version"] is not None:
                    self.version = body["weight_version"]
                return {}
            case "/update_weights":
                id = body["update_info"]["update"]
                threads = [threading.Thread(target=each.load, args=(id,)) for each in self.workers]
                for each in threads:
                    each.start()
                for each in threads:
                    each.join()
                return {}
        raise AssertionError(path)

    def close(self):
        with self.changed:
            self.is_paused = False
            self.changed.notify_all()
        self._close_workers()
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()


class _Handler(BaseHTTPRequestHandler):
    vllm: FakeVllm

    def _do(self):
        parts = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.vllm.calls.append(parts.path)
        status, answer = 200, None
        fault = self.vllm.faults.get(parts.path)
        if callable(fault):
            fault = fault()
        if fault is None:
            answer = self.vllm.answer(parts.path, parse_qs(parts.query), body)
        else:
            status, answer = fault
        data = answer if isinstance(answer, bytes) else None
        if data is None:
            data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        with suppress(ConnectionError):  # the client had a deadline
            self.wfile.write(data)

    do_GET = do_POST = _do

    def log_message(self, *words):
        pass


def arrays(version):
    """Weights that say which version they are."""
    return {f"layers.{n}.w": np.full((8, 16), version * 100 + n, np.float32) for n in range(6)}


def holds(worker, version):
    wanted = arrays(version)
    return worker.model.keys() == wanted.keys() and all(
        worker.model[name].tobytes() == wanted[name].tobytes() for name in wanted
    )
