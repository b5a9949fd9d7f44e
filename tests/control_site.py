"""For tests of control: an engine and a trainer in processes, a control server, and its client."""

import http.client
import json
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import flyweight as fw
from child_processes import LIMIT, Child, until
from flyweight.lifecycle.engine import ModelEngine
from flyweight.lifecycle.worker import Worker
from flyweight.server.fleet import Fleet
from flyweight.server.http import HttpServer, listen
from versioned_models import assign, weights

VERSIONS = (1, 2, 3)
NBYTES = 1 << 14
TOKEN = "0123456789abcdef0123456789abcdef"
CONTROL_ROUTES = [
    ("POST", "/v1/pause"),
    ("POST", "/v1/resume"),
    ("POST", "/v1/sleep"),
    ("POST", "/v1/wakeup"),
    ("POST", "/v1/update_weights"),
    ("POST", "/v1/abort_requests"),
    ("GET", "/clear_load_weight"),
    ("GET", "/update_model_weight"),
]


class AbortableEngine(ModelEngine):
    """Its requests run until they are told to finish, or are aborted."""

    def __init__(self, model):
        super().__init__(model)
        self.finish = threading.Event()

    def abort_requests(self):
        self.finish.set()


def engine(address, cell, options, pipe):
    """Serve until told to end; `request` begins one that runs until `finish`."""
    model, store = weights(0, options.pop("nbytes", NBYTES)), options.pop("store", None)
    fallback = [] if store is None else [store]
    machine = AbortableEngine(model)
    running = []

    def answer(began):
        with machine.request(LIMIT):
            began.set()
            assert machine.finish.wait(LIMIT)

    with (
        fw.Replica(model, address, name="engine", fallback=fallback) as replica,
        Worker(machine, replica, cell, **options),
    ):
        pipe.send(("ready", None))
        while (word := pipe.recv()) != "end":
            if word == "request":
                machine.finish.clear()
                began = threading.Event()
                running.append(threading.Thread(target=answer, args=(began,)))
                running[-1].start()
                assert began.wait(LIMIT)
            elif word == "finish":
                machine.finish.set()
                while running:
                    running.pop().join(LIMIT)
            pipe.send(("did", word))


class Engine(Child):
    """An engine's process; with `store=` it falls back on the versions there."""

    def __init__(self, address, cell, **options):
        super().__init__(engine, address, cell, options)
        assert self.told() == ("ready", None)

    def tell(self, word):
        self.send(word)
        assert self.told() == ("did", word)


def trainer(address, nbytes, pipe):
    """Publish what the pipe names."""
    model = weights(0, nbytes)
    with fw.Publisher(model, address, keep="memory") as publisher:
        pipe.send(("ready", None))
        while (version := pipe.recv()) is not None:
            assign(model, version)
            publisher.publish(version, timeout_seconds=LIMIT)
            pipe.send(("did", version))


class Trainer(Child):
    """A trainer's process, with the versions of VERSIONS at rest and the last one published."""

    def __init__(self, address, store, nbytes=NBYTES):
        for version in VERSIONS:
            fw.save(weights(version, nbytes), store, version=version)
        super().__init__(trainer, address, nbytes)
        self.address, self.store, self.place = address, store, store.parent
        assert self.told() == ("ready", None)
        self.publish(VERSIONS[-1])

    def publish(self, version):
        self.send(version)
        assert self.told() == ("did", version)


class Site:
    """Speaks HTTP with a control server, as rudely as a test wants."""

    def __init__(self, address, token):
        self.address, self.token = address, token
        self.netloc = address.removeprefix("http://")

    def ask(self, method, path, body=None, *, headers=None, token=None, timeout=LIMIT):
        """Return code and decoded body of an answer."""
        code, text, _ = self.raw(method, path, body, headers=headers, token=token, timeout=timeout)
        return code, json.loads(text) if text else None

    def raw(self, method, path, body=None, *, headers=None, token=None, timeout=LIMIT):
        connection = http.client.HTTPConnection(self.netloc, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.token if token is None else token}"}
        sent |= headers or {}
        try:
            connection.request(
                method, path, data, {name: value for name, value in sent.items() if value}
            )
            response = connection.getresponse()
            return response.status, response.read(), response.headers
        finally:
            connection.close()

    def good(self, method, path, body=None):
        """Return the result of a call that must succeed."""
        code, told = self.ask(method, path, body)
        assert code == 200, told
        assert told["status"] == "success"
        return told["result"]

    def replica(self, name=None):
        """Return how a replica stands, the first if none is named."""
        replicas = self.good("GET", "/status")["replicas"]
        return next(each for each in replicas if name in (None, each["name"]))

    @property
    def state(self):
        return self.replica()["state"]

    @contextmanager
    def events(self):
        """Yield a function that returns the next status of the stream."""
        connection = http.client.HTTPConnection(self.netloc, timeout=LIMIT)
        try:
            connection.request("GET", "/events", headers={"Authorization": f"Bearer {self.token}"})
            response = connection.getresponse()
            assert response.status == 200

            def told():
                while line := response.readline():
                    if line.startswith(b"data: "):
                        return json.loads(line.removeprefix(b"data: "))
                return None

            yield told
        finally:
            connection.close()


@contextmanager
def frozen(site):
    """Stop the process of a site's engine; in the end it goes on, and takes requests again."""
    site.engine.stop()
    try:
        yield
    finally:
        site.engine.kill(signal.SIGCONT)
        until(lambda: site.ask("POST", "/v1/resume")[0] == 200)


@contextmanager
def serving(controls, store=None, port=0):
    """A control server in a thread of this process."""
    fleet, is_over = Fleet(controls), threading.Event()
    with listen(port=port) as listener, ThreadPoolExecutor(1) as thread:
        server = HttpServer(fleet, listener, is_over, host="127.0.0.1", token=TOKEN, store=store)
        site = Site(server.address, TOKEN)
        site.fleet, site.listener = fleet, listener
        ended = thread.submit(server.serve_until_over)
        try:
            yield site
        finally:
            is_over.set()
            try:
                ended.result(LIMIT)
            finally:
                fleet.close()


JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


class Stranger:
    """A TCP server that keeps all it receives, and answers each request by a function of it."""

    def __init__(self, answer=None, address=("127.0.0.1", 0), *, drop=None):
        self._answer, self._drop, self.received = answer, drop, bytearray()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._speak, args=(connection,), daemon=True).start()

    def _speak(self, connection):
        with connection, suppress(OSError):
            if self._drop is not None:
                self._drop(connection)
                return
            while data := connection.recv(65536):
                self.received += data
                answer = self._answer(data)
                if not answer:
                    return
                connection.sendall(answer)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._listener.shutdown(socket.SHUT_RDWR)  # the thread would keep the port otherwise
        self._thread.join(LIMIT)
        self._listener.close()


def told_json(body):
    data = json.dumps(body).encode()
    return JSON % (len(data), data)
