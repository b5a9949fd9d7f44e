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
START_SECONDS = 240
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
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
        sampling = {"temperature": 0, "max_tokens": count, "ignore_eos": True}
        body = {"token_ids": list(prompt), "sampling_params": sampling}
        choice = self.call("POST", "/inference/v1/generate", body, timeout=timeout)["choices"][0]
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
        self, model, log, *, ranks=1, engines=1, unpacked=False, backend="flyweight", port=None
    ):
        super().__init__(port or free_port())
        self.model, self.log = str(model), log
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in {**OPTIONS, "model": model, "port": self.port}.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        words += ["--host", "127.0.0.1", "--tensor-parallel-size", str(ranks), "--enable-scale-out"]
        words += ["--data-parallel-size", str(engines)]
        if backend:
            words += ["--weight-transfer-config", json.dumps({"backend": backend})]
        with open(log, "ab") as output:
            self.process = subprocess.Popen(
                words,
                env=environment(unpacked=unpacked, workers=ranks * engines),
                stdout=output,
                stderr=output,
                start_new_session=True,
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
        self.process.wait(20)

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
options, prompt, model = json.loads(sys.argv[1])
llm = LLM(model=model, skip_tokenizer_init=True, **options)
how = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
answer = llm.generate([{"prompt_token_ids": prompt}], how, use_tqdm=False)[0].outputs[0]
checksums = {}
for each in llm.collective_rpc("compute_weight_checksums"):
    checksums.update(each)
print("FRESH" + json.dumps({"tokens": list(answer.token_ids), "checksums": checksums}))
"""


def fresh(model, *, unpacked=False):
    """Return the tokens and checksums of a model that vLLM has loaded from its files."""
    given = json.dumps([OPTIONS, PROMPT, str(model)])
    env = {**environment(unpacked=unpacked), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FRESH, given], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.rpartition("FRESH")[2])


class Asking(threading.Thread):
    """Sends requests one after the other, and keeps when each was answered."""

    def __init__(self, server, count=4):
        super().__init__(daemon=True)
        self._server, self._count, self._is_over = server, count, threading.Event()
        self.answers, self.error = [], None

    def run(self):
        try:
            while not self._is_over.is_set():
                began = time.monotonic()
                tokens, spans = self._server.generate(count=self._count)
                self.answers.append((began, time.monotonic(), tokens, spans))
        except Exception as error:
            self.error = error

    def end(self):
        self._is_over.set()
        self.join(60)
        assert self.error is None, self.error
        return self.answers
