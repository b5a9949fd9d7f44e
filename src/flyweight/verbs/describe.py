"""Describe: what a path holds and what this machine can do, as plain data."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

from flyweight import __version__
from flyweight.adapters import torch_module
from flyweight.errors import FlyweightError
from flyweight.formats.snapshot import directory_name
from flyweight.spec.manifest import Json
from flyweight.stores.draft import LocalDraft
from flyweight.stores.local import LocalStore, as_path, refused
from flyweight.transports.nixl import NixlServer, check_nixl, nixl_version, rdma_devices
from flyweight.verbs.find import PathLike, open_source, versions
from flyweight.worker_threads import default_threads

_PACKAGES = "numpy xxhash msgspec click rich torch paddlepaddle safetensors ml_dtypes"


def inspect(path: PathLike, *, version: int | None = None) -> dict[str, Json]:
    """Return the tensors, files and versions at `path`."""
    with open_source(path, version=version) as stored:
        manifest = stored.manifest
        files: Counter[str] = Counter()
        for extent in manifest.extents:
            nbytes = manifest.tensors[extent.name].box_bytes(extent.box)
            files[extent.file.partition("#")[0]] += nbytes
        dtypes: Counter[str] = Counter()
        for spec in manifest.tensors.values():
            dtypes[spec.dtype.name] += spec.nbytes
        return {
            "place": stored.store.place,
            "format": stored.format,
            "version": manifest.version,
            "parent": manifest.parent,
            "versions": list(versions(path)) if Path(path).is_dir() else [],
            "writer": dict(manifest.writer),
            "num_tensors": len(manifest.tensors),
            "nbytes": manifest.nbytes,
            "dtypes": dict(dtypes),
            "files": dict(files),
            "tensors": {
                name: {
                    "dtype": spec.dtype.name,
                    "shape": list(spec.shape),
                    "nbytes": spec.nbytes,
                    "shards": len(shards),
                    "file": manifest.extents[shards[0].rank].file if shards else None,
                }
                for name, spec in manifest.tensors.items()
                for shards in [stored.shards(name)]
            },
            "tied": dict(manifest.tied),
            "values": dict(manifest.values),
        }


def inspect_versions(path: PathLike) -> list[dict[str, Json]]:
    """Return a record of each version of a run; one that does not open has the error instead."""
    records: list[dict[str, Json]] = []
    for version in versions(path):
        try:
            with open_source(Path(path) / directory_name(version)) as stored:
                manifest = stored.manifest
        except FlyweightError as error:
            records.append({"version": version, "error": str(error)})
            continue
        records.append(
            {
                "version": version,
                "parent": manifest.parent,
                "num_tensors": len(manifest.tensors),
                "nbytes": manifest.nbytes,
                "time": manifest.writer.get("time"),
                "error": None,
            }
        )
    return records


def doctor(path: PathLike | None = None) -> dict[str, Json]:
    """Return what is installed here, and what the file system at `path` can do."""
    place = as_path(path) if path is not None else Path(tempfile.gettempdir())
    try:
        free_bytes, disk = shutil.disk_usage(place).free, _disk(place)
    except OSError as cause:
        raise refused(cause, f"cannot try out {str(place)!r}") from cause
    packages: dict[str, Json] = {}
    for package in _PACKAGES.split():
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = None
    return {
        "flyweight": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": default_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": packages,
        "gpus": list(torch_module.gpus()),
        "network": _network(),
        "place": str(place),
        "free_bytes": free_bytes,
        "disk": disk,
    }


def _network() -> dict[str, Json]:
    """Say how weights would come from another host like this one, and why not by RDMA.

    NIXL is started in a process of its own, where it can do no harm.
    """
    transport, why = "rdma", f"NIXL {nixl_version()} works"
    try:
        check_nixl()
        with closing(NixlServer()) as server:
            server.running()
    except FlyweightError as error:
        transport, why = "read", str(error)
    return {"transport": transport, "why": why, "rdma": list(rdma_devices())}


def _disk(place: Path) -> dict[str, Json]:
    """Try on a temporary file which ways to read and write work here."""
    with tempfile.TemporaryDirectory(dir=place, prefix=".flyweight-doctor-") as scratch:
        directory = Path(scratch) / "probe"
        with LocalDraft(directory) as draft:
            draft.reserve("probe", 1 << 20)
            can_write_unbuffered = draft.can_go_direct("probe")
            draft.commit()
        with closing(LocalStore(directory)) as store:
            store.read("probe", 0, 4096)
            ways = store.ways("probe")
    return {"unbuffered_writes": can_write_unbuffered, **ways}
