"""Real processes of vLLM for tests: a server, and a model that is loaded afresh from its files."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
START_SECONDS = 900
"""A limit that only finds hangs: three servers start at the same time."""
GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONGEST = 1 << 16
ENDLESS = LONGEST - 100
"""So many tokens take any machine longer than a test waits for anything."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 256 << 20,
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(*, unpacked=False, workers=1):
    found = {**os.environ, **ENVIRONMENT}
    if workers > 1:
        found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(each) for each in range(workers))
    if unpacked:
        found["PYTHONPATH"] = str(HERE / "unpacked")
    return found


def asked(prompt, count):
    """Return the body of a request for greedy tokens."""
    sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
    return {"token_ids": list(prompt), "sampling_params": sampling}


class Client:
    """Calls of a vLLM server on this host."""

    def __init__(self, port):
        self.port, self.address = port, f"http://127.0.0.1:{port}"

    def call(self, method, path, body=None, *, timeout=60, is_json=True):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            assert answer.status == 200, f"{path}: {answer.status} {text}"
            return json.loads(text) if is_json else text
        finally:
            connection.close()

    def tokens(self, *, count=32, prompt=PROMPT, timeout=60):
        """Return the greedy tokens that follow a prompt."""
        return self.generate(count=count, prompt=prompt, timeout=timeout)[0]

    def generate(self, *, count=32, prompt=PROMPT, timeout=60):
        """Return the greedy tokens, and which of them are of which version."""
        body = asked(prompt, count)
        choice = self.call("POST", GENERATE, body, timeout=timeout)["choices"][0]
        return choice["token_ids"], choice.get("weight_versions")

    def checksums(self):
        return self.call("POST", "/weight_checker", {"action": "checksum"})["checksums"]

    def is_paused(self):
        return self.call("GET", "/is_paused")["is_paused"]

    def version(self):
        return self.call("GET", "/weight_info")["weight_version"]


class Server(Client):
    """A vLLM server in its own process group."""

    def __init__(
        self, model, log, *, ranks=1, engines=1, unpacked=False, backend="flyweight", **options
    ):
        super().__init__(free_port())
        self.model, self.log = str(model), log
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in {**OPTIONS, **options, "model": model, "port": self.port}.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        words += ["--host", "127.0.0.1", "--tensor-parallel-size", str(ranks), "--enable-scale-out"]
        words += ["--data-parallel-size", str(engines)]
        if backend:
            words += ["--weight-transfer-config", json.dumps({"backend": backend})]
        self._words, self._env = words, environment(unpacked=unpacked, workers=ranks * engines)
        self._start()

    def _start(self):
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                self._words, env=self._env, stdout=output, stderr=output, start_new_session=True
            )

    def wait(self):
        """Return once it answers requests."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, f"vLLM ended:\n{self.log.read_text()[-5000:]}"
            try:
                self.call("GET", "/health", is_json=False)
                return self
            except (OSError, AssertionError):
                assert time.monotonic() < deadline, self.log.read_text()[-5000:]
                time.sleep(0.2)

    def kill(self):
        """End it and its workers, as the kernel does to a process that takes too much memory."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)

    def start_again(self):
        """Start what was killed, at the same port, and return once it answers requests."""
        self._start()
        self.wait()

    def close(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self):
        return self.wait()

    def __exit__(self, *raised):
        self.close()


FRESH = """
import json, sys
from vllm import LLM, SamplingParams
from flyweight.engines.vllm import VllmEngine
from flyweight.errors import LifecycleError
options, prompt, model = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, distributed_executor_backend="uni", **options)
how = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
answer = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs[0]
checksums = {}
for each in llm.collective_rpc("compute_weight_checksums"):
    checksums.update(each)
found = {"tokens": list(answer.token_ids), "checksums": checksums}
try:
    VllmEngine(llm, "unix:nowhere")
except LifecycleError as error:
    found["refusal"] = str(error)
print("FRESH" + json.dumps(found))
"""


def fresh(model, *, unpacked=False):
    """Return the tokens and checksums of a model that vLLM has loaded from its files.

    It has no backend, so also how an engine is refused that needs one.
    """
    given = json.dumps([OPTIONS, PROMPT, str(model)])
    env = {**environment(unpacked=unpacked), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, given],
        env=env,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.rpartition("FRESH")[2])


class Stream:
    """A request whose tokens are read as they come; it runs until it is aborted.

    Once this is made, it runs: its first token is there. It ends with its `with` statement.
    """

    def __init__(self, server, count=ENDLESS):
        self._server = server
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({**asked(PROMPT, count), "stream": True})
        self._connection.request("POST", GENERATE, body, {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        self.tokens, self.spans = [], None
        while not self.tokens:
            assert self._read(), "it ended without a token"

    def _read(self):
        """Read the next tokens; return False at the end."""
        while not (line := self._answer.readline()).startswith(b"data: {"):
            if not line:
                self._connection.close()
                return False
        (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
        self.tokens += choice["token_ids"]
        self.spans = choice.get("weight_versions")
        return True

    def end(self):
        """Read to the end; return the tokens, and the versions of spans of them."""
        while self._read():
            pass
        return self.tokens, [(each["version"], each["start"], each["end"]) for each in self.spans]

    def abort(self):
        """Have vLLM end all requests, and return what `end` returns."""
        self._server.call("POST", "/abort_requests", {})
        return self.end()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._connection.close()  # vLLM ends what nobody reads


class Asking(threading.Thread):
    """Sends requests one after the other, and keeps when each was answered."""

    def __init__(self, server, count=4):
        super().__init__(daemon=True)
        self._server, self._count, self._is_over = server, count, threading.Event()
        self.answers, self.error = [], None

    def run(self):
        try:
            while not (self.answers and self._is_over.is_set()):
                began = time.monotonic()
                tokens, spans = self._server.generate(count=self._count)
                self.answers.append((began, time.monotonic(), tokens, spans))
        except Exception as error:
            self.error = error

    def end(self):
        self._is_over.set()
        self.join(60)
        assert not self.is_alive(), "a request is not answered"
        assert self.error is None, self.error
        return self.answers
