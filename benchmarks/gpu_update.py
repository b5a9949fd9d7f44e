"""How long does it take to bring new weights from a trainer to a replica on the same GPU?

Trainer and replica are two processes, each with a model of its own. The limit is one flat copy of the
same bytes on the device; for buckets two of them; what is verified is read once more on each side. Beside
it, written anew from their description, how vLLM packs tensors into one buffer that goes by CUDA IPC
in lock-step, and checkpoint-engine if it is installed. `--cpu --quick` tries all of it without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from math import prod
from multiprocessing.connection import Connection
from typing import Any

import torch
from measure import Child, ChildFailed, record, spread
from torch.multiprocessing.reductions import reduce_tensor

import flyweight as fw

MIB = 1 << 20
WAIT_SECONDS = 30.0  # for a peer, in a child; the parent waits longer, for the whole answer
REST_SECONDS = 0.005  # between rounds, so that the replica asks before the clock starts
PACKED_BYTES = 1024 * MIB  # vLLM's default
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15, signed
Weights = dict[str, torch.Tensor]
Commands = Mapping[str, Callable[..., object]]


def qwen3_8b(divisor: int, num_layers: int) -> dict[str, tuple[int, ...]]:
    """Shapes of Qwen3-8B: 399 tensors of 16.4 GB in bf16, unless they are to be smaller."""
    hidden, keys, inner, head, vocab = (
        each // divisor for each in (4096, 1024, 12288, 128, 151936)
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    block = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_norm": (head,), "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": each for name, each in block.items()}
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


class Device:
    """All that differs between a GPU and a dry run without one."""

    def __init__(self, kind: str) -> None:
        self.kind, self.is_cuda = kind, kind == "cuda"
        if self.is_cuda:
            torch.cuda.init()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_cuda else "none, a dry run"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        self.synchronize()
        return torch.cuda.mem_get_info()[0] if self.is_cuda else 0

    def give_back(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    def seconds(self, work: Callable[[], object]) -> float:
        """Time work on the device, by its own clock."""
        if not self.is_cuda:
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.kind)
        return tensor if self.is_cuda else tensor.share_memory_()  # so that it can be mapped


def sums(weights: Weights) -> list[int]:
    """A sum over each tensor's words, by their places, that has nothing to do with our digest."""
    found = []
    step, device = 16 * MIB, next(iter(weights.values())).device
    factors = (2 * torch.arange(step, device=device) + 1) * _GOLDEN
    for tensor in weights.values():
        words = tensor.view(-1).view(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=device)
        for number, start in enumerate(range(0, len(words), step)):
            some = words[start : start + step]
            total += (some * factors[: len(some)]).sum() * (2 * number + 1)
        found.append(total)
    return [int(each) for each in torch.stack(found).cpu()]


def buckets(weights: Weights, nbytes: int) -> Iterator[list[tuple[str, int, int]]]:
    """Cut a model into lists of (name, start, bytes) that fit; a larger tensor is one alone."""
    found: list[tuple[str, int, int]] = []
    at = 0
    for name, tensor in weights.items():
        if found and at + tensor.nbytes > nbytes:
            yield found
            found, at = [], 0
        found.append((name, at, tensor.nbytes))
        at += tensor.nbytes
    yield found


def heard(line: Connection) -> Any:
    """Return what the peer sends; raise if it sends nothing."""
    if not line.poll(WAIT_SECONDS):
        raise TimeoutError(f"the peer has sent nothing for {WAIT_SECONDS:g} s")
    return line.recv()


# What the two processes do.


def trainer(kind: str, shapes: Mapping[str, tuple[int, ...]], line: Connection) -> Commands:
    """A process with a model that it publishes in several ways."""
    device = Device(kind)
    torch.manual_seed(0)
    weights = {name: device.empty(shape).normal_() for name, shape in shapes.items()}
    total = sum(tensor.nbytes for tensor in weights.values())
    opened: list[fw.Publisher] = []
    buffer: list[torch.Tensor] = []

    def floor(repeats: int) -> dict[str, list[float]]:
        """What the device itself takes to copy, and to read, the same bytes."""

        def measured() -> dict[str, list[float]]:
            source, sink = (device.empty((total,), torch.uint8).fill_(each) for each in (1, 2))
            words = source.view(torch.int64)
            ways = {"flat copy": lambda: sink.copy_(source), "int64 sum": words.sum}
            runs = {
                name: [device.seconds(work) for _ in range(3 + repeats)]
                for name, work in ways.items()
            }
            return {name: each[3:] for name, each in runs.items()}

        found = measured()
        device.give_back()
        return found

    def opens(address: str, options: Mapping[str, Any]) -> str:
        opened.append(fw.Publisher(weights, address, timeout_seconds=WAIT_SECONDS, **options))
        return opened[0].address

    def publish(num_rounds: int, rest_seconds: float) -> list[dict[str, float]]:
        found = []
        publisher = opened[0]
        for _ in range(num_rounds):
            time.sleep(rest_seconds)
            version = 0 if publisher.version is None else publisher.version + 1
            device.synchronize()
            started = time.perf_counter()
            report = publisher.publish(version, num_replicas=1, timeout_seconds=WAIT_SECONDS)
            seconds = time.perf_counter() - started
            if report.failed:
                raise report.failed[0].error or RuntimeError(str(report))
            part = report.replicas[0]
            found.append(
                {
                    "publish": seconds, "publisher_digest": report.digest_seconds,
                    "replica_copy": part.copy_seconds, "replica_verify": part.verify_seconds,
                }
            )  # fmt: skip
        return found

    def close() -> None:
        opened.pop().close()

    def change() -> None:
        for tensor in weights.values():
            tensor.add_(1)

    def pack(num_rounds: int) -> list[float]:
        """vLLM's packed way: one buffer, filled, told, emptied, told."""
        plan = list(buckets(weights, PACKED_BYTES))
        if not buffer:
            buffer.append(device.empty((max(sum(n for _, _, n in each) for each in plan),), torch.uint8))  # fmt: skip
        found = []
        for _ in range(num_rounds):
            time.sleep(REST_SECONDS)
            device.synchronize()
            started = time.perf_counter()
            for each in plan:
                for name, at, nbytes in each:
                    buffer[0][at : at + nbytes].copy_(weights[name].view(-1).view(torch.uint8))
                device.synchronize()
                line.send((reduce_tensor(buffer[0]), each))
                heard(line)
            found.append(time.perf_counter() - started)
        return found

    def checkpoint_engine(num_rounds: int) -> list[tuple[float, float]]:
        from checkpoint_engine.ps import ParameterServer

        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        server = ParameterServer(auto_pg=True)
        takes = inspect.signature(server.register_checkpoint).parameters
        more = {"use_shared_memory_pool": True} if "use_shared_memory_pool" in takes else {}
        found = []
        for _ in range(num_rounds):
            device.synchronize()
            started = time.perf_counter()
            server.register_checkpoint("policy", named_tensors=weights, **more)
            server.gather_metas("policy")
            registered = time.perf_counter()
            server.update("policy", line.send)
            ended = time.perf_counter()
            found.append((ended - started, ended - registered))
            server.unregister_checkpoint("policy")
        return found

    return {
        "about": lambda: (device.name, total, len(weights)), "floor": floor, "open": opens,
        "publish": publish, "close": close, "change": change, "pack": pack,
        "checkpoint_engine": checkpoint_engine, "sums": lambda: sums(weights),
        "free_bytes": device.free_bytes,
    }  # fmt: skip


def replica(kind: str, shapes: Mapping[str, tuple[int, ...]], line: Connection) -> Commands:
    """A process with a model that follows."""
    device = Device(kind)
    weights = {name: device.empty(shape).fill_(0) for name, shape in shapes.items()}
    joined: list[fw.Replica] = []

    def join(address: str) -> None:
        joined.append(fw.Replica(weights, address))

    def leave() -> None:
        joined.pop().close()

    def update(num_rounds: int) -> list[dict[str, Any]]:
        found = []
        for _ in range(num_rounds):
            report = joined[0].update(timeout_seconds=WAIT_SECONDS)
            found.append(
                {"update": report.seconds, "strategy": report.strategy, "verified": report.verified}
            )
        return found

    def unpack(num_rounds: int, num_buckets: int) -> None:
        last = None  # kept, so that the buffer stays mapped from bucket to bucket
        for _ in range(num_rounds * num_buckets):
            (rebuild, args), layout = heard(line)
            last = rebuild(*args)
            for name, at, nbytes in layout:
                tensor = weights[name]
                tensor.copy_(last[at : at + nbytes].view(tensor.dtype).view(tensor.shape))
            device.synchronize()
            line.send(True)
        del last

    def checkpoint_engine(num_rounds: int) -> None:
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc

        def load(some: list[tuple[str, torch.Tensor]]) -> None:
            for name, tensor in some:
                weights[name].copy_(tensor)

        context = zmq.Context()
        for _ in range(num_rounds):
            (_, path), *_ = heard(line)
            update_weights_from_ipc(context, path, device_id=0, run=load)

    def clear() -> None:
        for tensor in weights.values():
            tensor.zero_()
        device.synchronize()

    return {
        "about": lambda: None, "join": join, "leave": leave, "update": update, "unpack": unpack,
        "checkpoint_engine": checkpoint_engine, "clear": clear, "sums": lambda: sums(weights),
        "free_bytes": device.free_bytes,
    }  # fmt: skip


# What the parent does, which never touches a device.


class Pair:
    """A trainer and a replica, and what is left of the time for both."""

    def __init__(self, options: argparse.Namespace, env: Mapping[str, str] | None = None) -> None:
        self._options, self._ends_at = options, options.started + options.limit_seconds
        kind = "cpu" if options.cpu else "cuda"
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        self.trainer = Child(trainer, kind, options.shapes, ours, env=env)
        self.replica = Child(replica, kind, options.shapes, theirs)
        ours.close()
        theirs.close()
        try:
            self.about, _ = self.both(("about",), ("about",))
        except BaseException:
            self.close()
            raise

    def _left(self) -> float:
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise ChildFailed(f"out of time: {self._options.limit_seconds:g} s are over")
        return min(left, 2 * WAIT_SECONDS)

    def ask(self, child: Child, word: str, *args: object) -> Any:
        return child.ask(word, *args, timeout_seconds=self._left())

    def end(self, child: Child, word: str) -> None:
        """Have a child tidy up, if it is still there."""
        with suppress(ChildFailed, OSError):
            self.ask(child, word)

    def both(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, Any]:
        """Give one command to the trainer and one to the replica; hear both out in any case."""
        self.replica.tell(*second)
        self.trainer.tell(*first)
        answers, errors = [], []
        for child in (self.trainer, self.replica):
            try:
                answers.append(child.answer(self._left()))
            except ChildFailed as error:
                errors.append(str(error))
        if errors:
            raise ChildFailed("\n".join(errors))
        return answers[0], answers[1]

    def check(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
        """Run one more round, of changed weights into cleared ones, and compare every byte."""
        self.ask(self.replica, "clear")
        self.ask(self.trainer, "change")
        self.both(first, second)
        mine, theirs = self.both(("sums",), ("sums",))
        assert mine == theirs, "other bytes in the replica than in the trainer"

    def close(self) -> None:
        self.replica.close()
        self.trainer.close()


def rounds_of(pair: Pair, options: argparse.Namespace, place: str, *, growth: bool, **more: Any) -> dict[str, Any]:  # fmt: skip
    """Publish again and again, and return what the rounds took."""
    warm, kept = options.warm_up, options.repeats
    address = f"unix:{tempfile.mkdtemp(dir=place)}/policy"
    pair.ask(pair.replica, "join", pair.ask(pair.trainer, "open", address, more))
    with ExitStack() as stack:
        stack.callback(pair.end, pair.trainer, "close")
        stack.callback(pair.end, pair.replica, "leave")
        told, updates = pair.both(
            ("publish", warm + kept, REST_SECONDS), ("update", warm + kept)
        )  # fmt: skip
        row: dict[str, Any] = {key: updates[-1].pop(key) for key in ("strategy", "verified")}
        for key in told[0]:
            row[key] = spread(each[key] for each in told[warm:])
        row["update"] = spread(each["update"] for each in updates[warm:])
        if growth:
            before = pair.both(("free_bytes",), ("free_bytes",))
            told, _ = pair.both(("publish", options.rounds, 0.0), ("update", options.rounds))
            after = pair.both(("free_bytes",), ("free_bytes",))
            row["growth"] = {
                "rounds": options.rounds, "free_bytes_before": before, "free_bytes_after": after,
                "grown_bytes": max(a - b for a, b in zip(before, after, strict=True)),
                "publish": spread(each["publish"] for each in told),
            }  # fmt: skip
        pair.check(("publish", 1, REST_SECONDS), ("update", 1))
    return row


def packed(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    empty = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in options.shapes.items()}  # fmt: skip
    num_buckets = len(list(buckets(empty, PACKED_BYTES)))
    num_rounds = options.warm_up + options.repeats
    seconds, _ = pair.both(("pack", num_rounds), ("unpack", num_rounds, num_buckets))
    pair.check(("pack", 1), ("unpack", 1, num_buckets))
    return {"publish": spread(seconds[options.warm_up :]), "buckets": num_buckets}


def checkpoint_engine(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    num_rounds = 1 + min(3, options.repeats)
    seconds, _ = pair.both(
        ("checkpoint_engine", num_rounds), ("checkpoint_engine", num_rounds)
    )  # fmt: skip
    mine, theirs = pair.both(("sums",), ("sums",))
    assert mine == theirs, "other bytes in the replica than in the trainer"
    return {
        "publish": spread(whole for whole, _ in seconds[1:]),
        "update": spread(update for _, update in seconds[1:]),
    }


def told(name: str, row: dict[str, Any], total: int, floor_ms: float, limit_ms: float) -> None:
    """Add what a row says beside the floor, and print it."""
    publish = row["publish"]["median_ms"]
    row["gb_per_second"] = round(total / 1e6 / publish, 1)
    row["floor_over_publish"] = round(floor_ms / publish, 3)
    row["limit_ms"] = round(limit_ms, 3)
    row["limit_over_publish"] = round(limit_ms / publish, 3)
    update = row.get("update", {}).get("median_ms")
    if update:
        row["floor_over_update"] = round(floor_ms / update, 3)
    cells = [f"{publish:8.2f} ({row['publish']['min_ms']:7.2f}..{row['publish']['max_ms']:7.2f})"]
    for key in ("update", "replica_copy", "replica_verify", "publisher_digest"):
        cells.append(f"{row[key]['median_ms']:8.2f}" if key in row else " " * 8)
    print(f"{name:28s} {'  '.join(cells)}   {row['gb_per_second']:8.1f}  {row['floor_over_publish']:5.2f}  {row.get('floor_over_update', float('nan')):5.2f}")  # fmt: skip
    if "growth" in row:
        grown = row["growth"]
        print(f"{'':28s} {grown['rounds']} more rounds, median {grown['publish']['median_ms']:.2f} ms, device memory grew by {grown['grown_bytes']} bytes")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200, help="of which none may take memory")
    parser.add_argument("--bucket-bytes", type=int, default=512 * MIB)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=150.0)
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU; keeps no record")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a small model; keeps no record")
    options = parser.parse_args()
    options.started = time.monotonic()
    options.shapes = qwen3_8b(16, 2) if options.quick else qwen3_8b(1, 36)
    if options.quick:
        options.rounds, options.bucket_bytes = 20, 4 * MIB
    total = 2 * sum(map(prod, options.shapes.values()))
    bucketed = {
        "transport": "bucketed", "bucket_bytes": options.bucket_bytes, "depth": options.depth
    }  # fmt: skip
    mapped = {"transport": "mapped"}
    rows: dict[str, Any] = {}
    result: dict[str, Any] = {
        "bytes": total, "tensors": len(options.shapes), "repeats": options.repeats,
        "bucket_bytes": options.bucket_bytes, "depth": options.depth, "rows": rows,
    }  # fmt: skip
    place = tempfile.TemporaryDirectory(prefix="flyweight-bench-")
    floors: dict[str, float] = {}

    def tried(name: str, work: Callable[[], dict[str, Any]], copies: int, reads: int) -> None:
        """Keep what a way took, or why it did not work; the others go on."""
        try:
            rows[name] = work()
        except (ChildFailed, AssertionError, OSError) as error:
            rows[name] = {"error": str(error)}
            print(f"{name:28s} {str(error).strip().splitlines()[-1]}")
            print(error, file=sys.stderr)
            return
        limit = copies * floors["flat copy"] + reads * floors["int64 sum"]
        told(name, rows[name], total, floors["flat copy"], limit)

    def with_pair(work: Callable[[Pair], None], env: Mapping[str, str] | None = None) -> None:
        try:
            pair = Pair(options, env)
        except (ChildFailed, OSError) as error:
            rows[f"processes {len(rows)}"] = {"error": str(error)}
            print(error, file=sys.stderr)
            return
        try:
            work(pair)
        finally:
            pair.close()

    def ours(pair: Pair) -> None:
        name, nbytes, num_tensors = pair.about
        assert (nbytes, num_tensors) == (total, len(options.shapes))
        result["gpu"] = name
        limits = pair.ask(pair.trainer, "floor", 20 if not options.quick else 3)
        result["limits"] = {key: spread(each) for key, each in limits.items()}
        floors.update({key: 1000 * statistics.median(each) for key, each in limits.items()})
        print(f"\n{total / 1e9:.1f} GB in {num_tensors} tensors, gpu: {name}")
        for key, each in floors.items():
            print(f"{key:28s} {each:8.2f} ms {total / 1e6 / each:8.1f} GB/s")
        print(f"{'':28s} {'publish ms':>27s}  {'update':>8s}  {'copy':>8s}  {'verify':>8s}  {'digest':>8s}       GB/s  floor/publish, /update")  # fmt: skip
        for label, more, copies in (("mapped", mapped, 1), ("bucketed", bucketed, 2)):
            for should_verify in (False, True):
                tried(
                    f"{label}{', verified' if should_verify else ''}",
                    lambda m=more, v=should_verify: rounds_of(  # type: ignore[misc]
                        pair, options, place.name, growth=not v, should_verify=v, **m
                    ),
                    copies,
                    2 * should_verify,
                )
        tried("packed IPC, as vLLM's", lambda: packed(pair, options), 2, 0)

    def expandable(pair: Pair) -> None:
        for should_verify in (False, True):
            tried(
                f"expandable mapped{', verified' if should_verify else ''}",
                lambda v=should_verify: rounds_of(  # type: ignore[misc]
                    pair, options, place.name, growth=False, should_verify=v, **mapped
                ),
                1,
                2 * should_verify,
            )

    def theirs(pair: Pair) -> None:
        tried("checkpoint-engine", lambda: checkpoint_engine(pair, options), 1, 0)

    with place:
        try:
            with_pair(ours)
            with_pair(expandable, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
            if importlib.util.find_spec("checkpoint_engine") is None:
                rows["checkpoint-engine"] = {"absent": "checkpoint_engine is not installed"}
                print(f"{'checkpoint-engine':28s} is not installed")
            elif not options.cpu:
                with_pair(theirs)
        finally:
            result["seconds_in_all"] = round(time.monotonic() - options.started, 1)
            print(f"{result['seconds_in_all']} s in all")
            if not (options.cpu or options.quick):
                record(str(__doc__).splitlines()[0], result, "triton", "checkpoint-engine", "pyzmq")


if __name__ == "__main__":
    main()
