"""VllmControl: the calls that control vLLM, over HTTP or in its own process.

`HttpControl` calls a server, `LlmControl` an `LLM`, `AsyncLlmControl` an `AsyncLLM`. All have a
deadline but those of an `LLM`, which runs in the thread that calls it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import monotonic
from typing import Any, Literal, Protocol
from urllib.parse import urlencode, urlsplit

from flyweight.engines.vllm_plugin import TRIED
from flyweight.errors import (
    MissingDependency,
    PeerFailed,
    PeerLost,
    SpecError,
    TransferTimeout,
)

InFlight = Literal["wait", "abort", "keep"]
_ROUTES = (
    *("/pause", "/resume", "/is_paused", "/init_weight_transfer_engine", "/start_weight_update"),
    *("/update_weights", "/finish_weight_update", "/weight_info", "/collective_rpc"),
    "/get_world_size",
)
_VERBS = (
    *("init_weight_transfer_engine", "start_weight_update", "update_weights"),
    *("finish_weight_update", "get_weight_version", "collective_rpc"),
)
_STATUS = "weight_transfer_engine"
"""The attribute of a worker that holds its backend; ours can be called."""
_STATUS_KEYS = {"boot", "rank", "held", "state", "is_open", "is_whole", "balancing"}
_MAX_ANSWER_BYTES = 16 << 20
_CONNECT_SECONDS = 5.0
_NUM_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


class VllmControl(Protocol):
    """One vLLM engine. Every call raises TransportError if vLLM cannot be reached, or fails."""

    place: str
    """Where it is, for messages."""

    def check(self, deadline: float) -> None:
        """Raise MissingDependency if this vLLM lacks a call that updates need."""

    def pause(self, in_flight: InFlight, deadline: float) -> None:
        """Return once no request runs and all caches are empty; what runs ends, or waits."""

    def resume(self, deadline: float) -> None: ...

    def is_paused(self, deadline: float) -> bool: ...

    def num_running(self, deadline: float) -> int: ...

    def num_engines(self, deadline: float) -> int:
        """Return how many data parallel engines there are, in all servers together."""

    def begin(self, request: Mapping[str, Any], deadline: float) -> None:
        """Send a request for an update to all workers."""

    def status(self, deadline: float) -> list[dict[str, Any]]:
        """Return the status of each worker."""

    def load(self, update: str, deadline: float) -> None:
        """Have all workers load the version that they have staged."""

    def finish(self, version: str | None, deadline: float) -> None:
        """End the update, and name the version to vLLM; None keeps the name that it has."""

    def version(self, deadline: float) -> str:
        """Return the version that vLLM names; 'default' after its start."""


class HttpControl:
    """A vLLM server, by its routes for development (VLLM_SERVER_DEV_MODE=1)."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecError(f"{address!r} is not the address of a server, as http://HOST:PORT is")
        self.place = address.rstrip("/")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._api_key = os.environ.get("VLLM_API_KEY") if api_key is None else api_key

    def check(self, deadline: float) -> None:
        paths = self._call("GET", "/openapi.json", deadline).get("paths", {})
        if missing := [route for route in _ROUTES if route not in paths]:
            version = self._call("GET", "/version", deadline).get("version", "of unknown version")
            raise MissingDependency(
                f"vLLM {version} at {self.place} has no {', '.join(missing)}; start it with "
                f"VLLM_SERVER_DEV_MODE=1, and use vLLM {TRIED} or one with the same routes"
            )

    def pause(self, in_flight: InFlight, deadline: float) -> None:
        self._call("POST", "/pause", deadline, query={"mode": in_flight, "clear_cache": "true"})

    def resume(self, deadline: float) -> None:
        self._call("POST", "/resume", deadline)

    def is_paused(self, deadline: float) -> bool:
        return bool(self._call("GET", "/is_paused", deadline)["is_paused"])

    def num_running(self, deadline: float) -> int:
        text = self._call("GET", "/metrics", deadline, is_json=False)
        return int(sum(float(each) for each in _NUM_RUNNING.findall(text)))

    def num_engines(self, deadline: float) -> int:
        whole, one = (
            self._call("GET", "/get_world_size", deadline, query={"include_dp": include})
            for include in ("true", "false")
        )
        return int(whole["world_size"]) // int(one["world_size"])

    def begin(self, request: Mapping[str, Any], deadline: float) -> None:
        self._call("POST", "/init_weight_transfer_engine", deadline, {"init_info": dict(request)})

    def status(self, deadline: float) -> list[dict[str, Any]]:
        answer = self._call("POST", "/collective_rpc", deadline, {"method": _STATUS})
        return checked_status(answer.get("results"), self.place)

    def load(self, update: str, deadline: float) -> None:
        self._call("POST", "/start_weight_update", deadline)
        self._call("POST", "/update_weights", deadline, {"update_info": {"update": update}})

    def finish(self, version: str | None, deadline: float) -> None:
        self._call("POST", "/finish_weight_update", deadline, {"weight_version": version})

    def version(self, deadline: float) -> str:
        return str(self._call("GET", "/weight_info", deadline)["weight_version"])

    def _call(
        self,
        method: str,
        path: str,
        deadline: float,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        is_json: bool = True,
    ) -> Any:
        """Return what a route answers; raise PeerFailed for an answer that is an error."""
        seconds = deadline - monotonic()
        if seconds <= 0:
            raise TransferTimeout(f"no time was left to call {path} of vLLM at {self.place}")
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        target = f"{self._path}{path}" + (f"?{urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body)
        connect_seconds = min(seconds, _CONNECT_SECONDS)
        connection = self._connection(self._host, self._port, timeout=connect_seconds)
        try:
            connection.connect()
            connection.sock.settimeout(seconds)
            connection.request(method, target, data, headers)
            response = connection.getresponse()
            content = response.read(_MAX_ANSWER_BYTES + 1)
        except TimeoutError as cause:
            raise TransferTimeout(
                f"vLLM at {self.place} did not answer {path} in {seconds:.3g} s"
            ) from cause
        except (OSError, HTTPException) as cause:
            why = str(cause) or type(cause).__name__
            raise PeerLost(f"vLLM at {self.place} cannot be reached for {path}: {why}") from cause
        finally:
            connection.close()
        text = content.decode("utf-8", "replace")
        if response.status != 200:
            raise PeerFailed(
                f"vLLM at {self.place} answers {path} with {response.status}: {text[:500].strip()}"
            )
        if not is_json:
            return text
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as cause:
            raise PeerFailed(f"vLLM at {self.place} answers {path} with no JSON") from cause
        if not isinstance(found, dict):
            raise PeerFailed(f"vLLM at {self.place} answers {path} with {text[:100]!r}")
        return found


class LlmControl:
    """An `LLM` in this process. It serves only inside `generate`, so nothing runs between calls."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.place = f"{type(llm).__name__} of process {os.getpid()}"

    def check(self, deadline: float) -> None:
        check_verbs(self._llm, (*_VERBS, "sleep", "wake_up", "reset_prefix_cache"))

    def pause(self, in_flight: InFlight, deadline: float) -> None:
        running = self.num_running(deadline)
        if running and in_flight == "wait":
            raise TransferTimeout(f"{running} requests were still running, and generate runs them")
        self._llm.sleep(level=0, mode="abort" if in_flight == "abort" else "keep")
        self._llm.reset_prefix_cache(reset_running_requests=True)

    def resume(self, deadline: float) -> None:
        self._llm.wake_up(tags=["scheduling"])

    def is_paused(self, deadline: float) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    def num_running(self, deadline: float) -> int:
        return int(self._llm.llm_engine.get_num_unfinished_requests())

    def num_engines(self, deadline: float) -> int:
        return 1  # with data parallelism, each process has an LLM of its own

    def begin(self, request: Mapping[str, Any], deadline: float) -> None:
        self._llm.init_weight_transfer_engine({"init_info": dict(request)})

    def status(self, deadline: float) -> list[dict[str, Any]]:
        try:
            found = self._llm.collective_rpc(_STATUS)
        except Exception as cause:  # vLLM raises anything
            raise PeerFailed(f"vLLM has no status: {type(cause).__name__}: {cause}") from cause
        return checked_status(found, self.place)

    def load(self, update: str, deadline: float) -> None:
        self._llm.start_weight_update()
        self._llm.update_weights({"update_info": {"update": update}})

    def finish(self, version: str | None, deadline: float) -> None:
        self._llm.finish_weight_update(version)

    def version(self, deadline: float) -> str:
        return str(self._llm.get_weight_version())


class AsyncLlmControl:
    """An `AsyncLLM` in this process, whose event loop runs in another thread."""

    def __init__(self, llm: Any) -> None:
        if getattr(llm, "output_handler", None) is None:
            raise SpecError("this AsyncLLM has no event loop yet; make it in a coroutine")
        self._llm, self._loop = llm, llm.output_handler.get_loop()
        self.place = f"{type(llm).__name__} of process {os.getpid()}"

    def check(self, deadline: float) -> None:
        check_verbs(self._llm, (*_VERBS, "pause_generation", "resume_generation", "is_paused"))

    def pause(self, in_flight: InFlight, deadline: float) -> None:
        self._run(self._llm.pause_generation(mode=in_flight, clear_cache=True), "pause", deadline)

    def resume(self, deadline: float) -> None:
        self._run(self._llm.resume_generation(), "resume", deadline)

    def is_paused(self, deadline: float) -> bool:
        return bool(self._run(self._llm.is_paused(), "is_paused", deadline))

    def num_running(self, deadline: float) -> int:
        return len(self._llm.output_processor.request_states)

    def num_engines(self, deadline: float) -> int:
        return int(self._llm.vllm_config.parallel_config.data_parallel_size)

    def begin(self, request: Mapping[str, Any], deadline: float) -> None:
        self._rpc("init_weight_transfer_engine", deadline, init_info=dict(request))

    def status(self, deadline: float) -> list[dict[str, Any]]:
        return checked_status(self._rpc(_STATUS, deadline), self.place)

    def load(self, update: str, deadline: float) -> None:
        self._rpc("start_weight_update", deadline)
        self._rpc("update_weights", deadline, update_info={"update": update})

    def finish(self, version: str | None, deadline: float) -> None:
        self._run(self._llm.finish_weight_update(version), "finish_weight_update", deadline)

    def version(self, deadline: float) -> str:
        return str(self._run(self._llm.get_weight_version(), "get_weight_version", deadline))

    def _rpc(self, method: str, deadline: float, **kwargs: Any) -> Any:
        return self._run(self._llm.collective_rpc(method, kwargs=kwargs), method, deadline)

    def _run(self, call: Any, name: str, deadline: float) -> Any:
        with suppress(RuntimeError):  # there is no event loop in this thread
            if asyncio.get_running_loop() is self._loop:
                call.close()
                raise SpecError(
                    "VllmEngine waits for the event loop of its AsyncLLM, so it cannot run in it; "
                    "use await asyncio.to_thread(VllmEngine, llm, address), and so for its methods"
                )
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        seconds = max(deadline - monotonic(), 0)
        try:
            return future.result(seconds)
        except FutureTimeout as cause:
            future.cancel()
            raise TransferTimeout(f"vLLM did not answer {name} in {seconds:.3g} s") from cause
        except Exception as cause:  # vLLM raises anything, also what its workers raised
            raise PeerFailed(f"vLLM's {name} failed: {type(cause).__name__}: {cause}") from cause


def control_for(server: object, api_key: str | None = None) -> VllmControl:
    """Return the control of a server by its address, of an `LLM`, or of an `AsyncLLM`."""
    if isinstance(server, str):
        return HttpControl(server, api_key)
    kinds = {kind.__name__ for kind in type(server).__mro__}
    if "LLM" in kinds:
        return LlmControl(server)
    if "AsyncLLM" in kinds:
        return AsyncLlmControl(server)
    raise SpecError(f"{type(server).__name__} is not an address, an LLM or an AsyncLLM of vLLM")


def check_verbs(llm: Any, verbs: Sequence[str]) -> None:
    """Raise MissingDependency if an object of vLLM lacks methods."""
    if missing := [verb for verb in verbs if not callable(getattr(llm, verb, None))]:
        raise MissingDependency(
            f"{type(llm).__name__} of this vLLM has no {', '.join(missing)}; use vLLM {TRIED} or "
            f"one with the same methods"
        )


def checked_status(found: object, place: str) -> list[dict[str, Any]]:
    """Return the status of each worker; raise PeerFailed unless all of them have our backend."""
    if not isinstance(found, list) or not found:
        raise PeerFailed(f"vLLM at {place} has no workers")
    if not all(isinstance(each, dict) and "boot" in each for each in found):
        raise PeerFailed(f"a worker of vLLM at {place} has {str(found[0])[:100]!r} for a status")
    if any(missing := _STATUS_KEYS - each.keys() for each in found):
        raise PeerFailed(
            f"the workers of vLLM at {place} have another version of flyweight: their status has "
            f"no {', '.join(sorted(missing))}"
        )
    return found
