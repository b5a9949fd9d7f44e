"""How fast do two ranks save together, and is that loaded by one, by two, and cut another way?

Every save ends durable, every one of our loads is checked. Ranks are started by torchrun, and the
time of a round is that of its slowest rank. The limit is plain unbuffered writes, or reads, of the
bytes that a rank needs, each byte once. Paddle 3.3.1 cannot load a layout other than the saved one on CPU ranks, so
it has no figure there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import measure
import torch
import torch.distributed as dist
from measure import Runs, drop_cache, llm_shapes, print_rows, record, warm_cache
from save import plain_writes, sync

import flyweight as fw

MIB = 1 << 20
Ways = dict[str, Callable[[], object]]


def local_rows(shape: tuple[int, ...], dim: int, rank: int, num_ranks: int) -> tuple[int, ...]:
    """The shape of a rank's part; every dim here is even."""
    return tuple(size // num_ranks if d == dim else size for d, size in enumerate(shape))


def weights(total_bytes: int, dim: int, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """bf16 parts of each tensor, cut along `dim` where it has one, every page touched."""
    generator = torch.Generator().manual_seed(rank)
    parts = {}
    for name, shape in llm_shapes(total_bytes).items():
        part = torch.empty(
            local_rows(shape, min(dim, len(shape) - 1), rank, num_ranks), dtype=torch.bfloat16
        )
        parts[name] = part.normal_(generator=generator)
    return parts


def as_dtensors(parts: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: DTensor.from_local(part, mesh, [Shard(min(dim, part.dim() - 1))], run_check=False)
        for name, part in parts.items()
    }


def as_paddle(parts: dict[str, torch.Tensor]) -> dict[str, object]:
    import paddle

    return {
        name: paddle.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(part))
        for name, part in parts.items()
    }


def plain_reads(files: list[Path], rank: int, num_ranks: int) -> None:
    """Read this rank's part of all bytes, 8 MiB at a time, into reused memory.

    Unbuffered where they are not in the page cache.
    """
    import mmap

    block = memoryview(mmap.mmap(-1, 8 * MIB))
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        size = os.fstat(fd).st_size
        try:
            os.preadv(fd, [bytearray(1)], size // 2, os.RWF_NOWAIT)
        except BlockingIOError:
            os.close(fd)
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        for number, start in enumerate(range(0, size, 8 * MIB)):
            if number % num_ranks == rank:
                os.preadv(fd, [block], start)
        os.close(fd)


def files_of(place: Path) -> list[Path]:
    return [path for path in place.rglob("*") if path.is_file()]


def run_rounds(ways: Ways, repeats: int, before: Callable[[str], None]) -> dict[str, Runs]:
    """Run every way in turn; a barrier before and after, so that the slowest rank counts."""
    runs = {name: Runs() for name in ways}
    for repeat in range(repeats + 1):  # the first round warms up and is not kept
        if repeat == 1:
            runs = {name: Runs() for name in ways}
        for name, way in ways.items():
            before(name)

            def together(way: Callable[[], object] = way) -> None:
                way()
                if dist.is_initialized():
                    dist.barrier()

            if dist.is_initialized():
                dist.barrier()
            runs[name].add(together)
    if dist.is_initialized():
        for each in runs.values():  # the memory of the rank that took most
            peak = torch.tensor(each.extra_bytes)
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            each.extra_bytes = peak.tolist()
    return runs


def join_paddle(rank: int, num_ranks: int, port: int) -> None:
    import paddle
    import paddle.distributed as pdist

    ends = [f"127.0.0.1:{port + 1 + each}" for each in range(num_ranks)]
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank), PADDLE_TRAINERS_NUM=str(num_ranks), PADDLE_TRAINER_ENDPOINTS=",".join(ends),
        PADDLE_CURRENT_ENDPOINT=ends[rank], PADDLE_MASTER=f"127.0.0.1:{port}", PADDLE_DISTRI_BACKEND="gloo",
    )  # fmt: skip
    paddle.set_device("cpu")
    pdist.init_parallel_env()
    pdist.barrier()


def phase_save(options: argparse.Namespace) -> dict[str, object]:
    """Two ranks, each with half of the rows."""
    import paddle
    import paddle.distributed as pdist
    import torch.distributed.checkpoint as dcp

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    join_paddle(rank, num_ranks, options.port)
    total = int(options.gib * 2**30)
    parts = weights(total, 0, rank, num_ranks)
    state = as_dtensors(parts, 0)
    mesh = pdist.ProcessMesh(list(range(num_ranks)), dim_names=["x"])
    theirs = {
        name: pdist.auto_parallel.api.dtensor_from_local(part, mesh, [pdist.Shard(0)])
        for name, part in as_paddle(parts).items()
    }
    root = options.place

    def paddle_save() -> None:
        pdist.save_state_dict(theirs, str(root / "paddle"))
        sync(root / "paddle" / f"{rank}_0.distcp")

    ways: Ways = {
        "limit: plain writes": lambda: plain_writes(root / f"plain{rank}", parts),
        "flyweight": lambda: fw.save_state_dict(state, root / "flyweight"),
        "torch DCP": lambda: dcp.save(dict(state), checkpoint_id=root / "dcp"),
        "Paddle + fsync": paddle_save,
    }

    def before(name: str) -> None:
        if rank == 0:
            for each in ("plain0", "plain1", "flyweight", "dcp", "paddle"):
                if name.lower().startswith(("limit", each)) or each in name.lower():
                    path = root / each
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            os.sync()

    runs = run_rounds(ways, options.repeats, before)
    del paddle
    return {name: each.summary(total) for name, each in runs.items()}


def load_ways(
    root: Path,
    parts: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    rank: int,
    num_ranks: int,
) -> Ways:
    import torch.distributed.checkpoint as dcp

    files = [path for path in files_of(root / "flyweight") if path.suffix == ".safetensors"]
    return {
        "limit: plain reads": lambda: plain_reads(files, rank, num_ranks),
        "flyweight": lambda: fw.load_state_dict(state, root / "flyweight"),
        "torch DCP": lambda: dcp.load(dict(state), checkpoint_id=root / "dcp"),
    }


def loads(ways: Ways, root: Path, options: argparse.Namespace, rank: int) -> dict[str, object]:
    total = int(options.gib * 2**30)
    found: dict[str, object] = {}
    for temperature in ("cold", "warm"):

        def before(name: str, temperature: str = temperature) -> None:
            if rank == 0:
                (drop_cache if temperature == "cold" else warm_cache)(files_of(root))

        runs = run_rounds(ways, options.repeats, before)
        found[temperature] = {name: each.summary(total) for name, each in runs.items()}
    return found


def phase_one(options: argparse.Namespace) -> dict[str, object]:
    """One process loads what two ranks saved, then saves it whole for the next phase."""
    import paddle
    import paddle.distributed as pdist
    import torch.distributed.checkpoint as dcp

    total = int(options.gib * 2**30)
    parts = weights(total, 0, 0, 1)
    theirs = as_paddle(parts)
    ways = load_ways(options.place, parts, parts, 0, 1)
    ways["Paddle"] = lambda: pdist.load_state_dict(theirs, str(options.place / "paddle"))
    found = loads(ways, options.place, options, 0)
    whole = options.place / "whole"
    fw.save(parts, whole / "flyweight")
    dcp.save(dict(parts), checkpoint_id=whole / "dcp")
    del paddle
    return found


def phase_two(options: argparse.Namespace) -> dict[str, object]:
    """Two ranks load what one process saved, and what two saved, cut the other way."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    total = int(options.gib * 2**30)
    found = {}
    parts = weights(total, 0, rank, num_ranks)
    state = as_dtensors(parts, 0)
    whole = options.place / "whole"
    found["1 to 2"] = loads(load_ways(whole, parts, state, rank, num_ranks), whole, options, rank)
    del parts, state
    parts = weights(total, 1, rank, num_ranks)
    state = as_dtensors(parts, 1)
    ways = load_ways(options.place, parts, state, rank, num_ranks)
    # Columns of rows that were saved whole: every rank has to read all of them to check any.
    found["2 to 2, other cut"] = loads(ways, options.place, options, rank)
    return found


PHASES = {"save": phase_save, "one": phase_one, "two": phase_two}


def run_phase(name: str, num_ranks: int, options: argparse.Namespace) -> dict[str, object]:
    """Run a phase in processes of its own and return what the first rank found."""
    out = options.place / f"{name}.json"
    words = [
        sys.argv[0],
        "--phase",
        name,
        "--place",
        options.place,
        "--gib",
        options.gib,
        "--repeats",
        options.repeats,
    ]
    words += ["--port", free_port()]
    launcher = (
        []
        if num_ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        [sys.executable, *map(str, [*launcher, *words])], check=True, timeout=3000, env=env
    )
    return json.loads(out.read_text())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--place", type=Path, help="where to write the files; a disk, not tmpfs")
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.phase:
        measure.GAUGE = measure.MemoryGauge()
        if options.phase != "one":
            dist.init_process_group("gloo")
        found = PHASES[options.phase](options)
        if not dist.is_initialized() or dist.get_rank() == 0:
            (options.place / f"{options.phase}.json").write_text(json.dumps(found))
        if dist.is_initialized():
            dist.barrier()
        return
    with tempfile.TemporaryDirectory(prefix="flyweight-bench-", dir=options.place) as scratch:
        options.place = Path(scratch)
        result: dict[str, object] = {"bytes": int(options.gib * 2**30), "repeats": options.repeats}
        result["save by 2"] = run_phase("save", 2, options)
        result["2 to 1"] = run_phase("one", 1, options)
        result |= run_phase("two", 2, options)
    for question in ("save by 2", "2 to 1", "1 to 2", "2 to 2, other cut"):
        rows = result[question]
        for title, each in (rows if question != "save by 2" else {"": rows}).items():  # type: ignore[union-attr]
            print_rows(f"{question} {title}, {options.gib:.1f} GiB in all", each)
    record(str(__doc__).splitlines()[0], result, "paddlepaddle")


if __name__ == "__main__":
    main()
