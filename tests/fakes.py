"""Complete small implementations of ports; the contracts of their ports hold them too."""

import secrets
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np

from flyweight.errors import (
    HandleGone,
    LifecycleError,
    SpecError,
    StoreError,
    TransferTimeout,
    TransportError,
)
from flyweight.memory import STAGING, Buffer
from flyweight.ports import UpdateReport
from flyweight.spec.box import Box
from flyweight.spec.dtype import BY_NUMPY
from flyweight.spec.manifest import Manifest, TensorSpec


class MemoryStore:
    """A store of files in memory, which notices when somebody reads outside of one."""

    def __init__(self, files):
        self._files = files

    @property
    def place(self):
        return "memory"

    def names(self):
        return sorted(self._files)

    def size(self, name):
        if name not in self._files:
            raise StoreError(f"no file {name!r} in memory")
        return len(self._files[name])

    def read(self, name, offset, nbytes):
        assert 0 <= offset <= offset + nbytes <= self.size(name), "read outside the file"
        return self._files[name][offset : offset + nbytes]

    def window(self, name, offset, nbytes, staging, *, may_map=True):
        return nullcontext(np.frombuffer(self.read(name, offset, nbytes), np.uint8))

    def is_cached(self, name, offset, nbytes):
        return True

    def read_into(self, name, offset, goals):
        for goal in goals:
            goal[:] = np.frombuffer(self.read(name, offset, len(goal)), np.uint8)
            offset += len(goal)

    def share_reads(self):
        pass

    def close(self):
        pass


class MemoryDraft:
    """A draft of files in memory, which a commit adds to those of a store."""

    def __init__(self, files):
        self._files, self._drafts = files, {}

    @property
    def place(self):
        return "memory"

    def reserve(self, name, nbytes):
        self._drafts[name] = bytearray(nbytes)

    def write(self, name, offset, data):
        assert 0 <= offset <= offset + len(data) <= len(self._drafts[name]), "write outside"
        self._drafts[name][offset : offset + len(data)] = data.tobytes()

    def flush(self):
        pass

    def commit(self):
        self._files.update((name, bytes(content)) for name, content in self._drafts.items())

    def abort(self):
        self._drafts = {}

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.abort()


class FakeRendezvousStore:
    """A store in one process."""

    def __init__(self):
        self._texts = {}

    def set(self, key, text, deadline):
        self._texts[key] = text

    def get(self, key, deadline):
        return self._texts.get(key)


class FileRendezvousStore:
    """A store in a directory, for ranks in several processes."""

    def __init__(self, directory):
        self._directory = Path(directory)

    def _path(self, key):
        return self._directory / quote(key, safe="")

    def set(self, key, text, deadline):
        self._directory.mkdir(exist_ok=True)
        draft = self._directory / f".{secrets.token_hex(8)}"
        draft.write_text(text)
        draft.rename(self._path(key))

    def get(self, key, deadline):
        try:
            return self._path(key).read_text()
        except FileNotFoundError:
            return None


@dataclass(frozen=True)
class ArrayBlock:
    """A whole array, as the one block of a tensor."""

    spec: TensorSpec
    array: np.ndarray

    @property
    def box(self):
        return Box.whole(self.array.shape)

    def items(self):
        return self.array.view(f"u{self.array.itemsize}")

    def write(self, items, data):
        self.array[items.slices] = data.view(self.array.dtype).reshape(items.shape)


class ArrayModel:
    """A source and a sink of whole numpy arrays."""

    def __init__(self, arrays):
        self.arrays, self.num_touched = arrays, 0

    @property
    def manifest(self):
        return Manifest({name: self._spec(name) for name in self.arrays})

    @property
    def staging(self):
        return STAGING

    def _spec(self, name):
        return TensorSpec(BY_NUMPY[self.arrays[name].dtype.name], self.arrays[name].shape)

    def boxes(self, name):
        return [Box.whole(self.arrays[name].shape)]

    def read(self, name, box=None, *, into=None):
        array = self.arrays[name]
        data = np.ascontiguousarray(array if box is None else array[box.slices])
        data = data.reshape(-1).view(np.uint8)
        if into is None:
            return data
        into[: len(data)] = data
        return into[: len(data)]

    def check_writable(self):
        if frozen := [name for name, array in self.arrays.items() if not array.flags.writeable]:
            raise SpecError(f"{len(frozen)} arrays are read-only: {frozen}")

    def blocks(self, name):
        return [ArrayBlock(self._spec(name), self.arrays[name])]

    def settle(self):
        pass

    def touched(self):
        self.num_touched += 1

    def finish(self, manifest):
        pass


class FileHandle(msgspec.Struct, frozen=True, tag="file", forbid_unknown_fields=True):
    name: str
    offset: int
    nbytes: int

    def __post_init__(self):
        if not 0 <= self.offset <= self.offset + self.nbytes < 2**63 or self.nbytes < 0:
            raise TransportError(f"handle of {self.nbytes} bytes at byte {self.offset}")


class FileTransport:
    """Offers copies, as files of a directory that all processes know."""

    def __init__(self, directory):
        self._directory, self._offered = directory, set()

    def offer(self, buffer):
        handle = FileHandle(secrets.token_hex(8), 0, buffer.nbytes)
        (self._directory / handle.name).write_bytes(buffer.items().tobytes())
        self._offered.add(handle)
        return handle

    def release(self, handle):
        self._offered.discard(handle)
        (self._directory / handle.name).unlink(missing_ok=True)

    def open(self, handle):
        try:
            data = np.fromfile(self._directory / handle.name, np.uint8)[handle.offset :]
        except FileNotFoundError as cause:
            raise HandleGone(f"file {handle.name!r} was released") from cause
        if len(data) < handle.nbytes:
            raise TransportError(f"{handle.nbytes} bytes wanted, the file has {len(data)}")
        return Buffer.of(data[: handle.nbytes])

    def close_handle(self, handle):
        pass

    def close(self):
        for handle in list(self._offered):
            self.release(handle)


class FakeEngine:
    """Counts requests, and remembers what it was told to release."""

    def __init__(self):
        self._changed, self._is_open, self._num_running = threading.Condition(), False, 0
        self.version, self.released = None, set()

    @contextmanager
    def request(self, timeout_seconds):
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_open, timeout_seconds):
                raise LifecycleError(f"took no requests for {timeout_seconds} s")
            self._num_running += 1
        try:
            yield self.version
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    @property
    def num_running(self):
        return self._num_running

    def pause(self, deadline):
        with self._changed:
            self._is_open = False
            seconds = max(deadline - time.monotonic(), 0)
            if not self._changed.wait_for(lambda: not self._num_running, seconds):
                raise TransferTimeout(f"{self._num_running} requests were still running")

    def resume(self, version):
        with self._changed:
            self._is_open, self.version = True, version
            self._changed.notify_all()

    def drop_cache(self):
        pass

    def abort_requests(self):
        pass

    def release_weights(self):
        self.released.add("weights")

    def restore_weights(self):
        self.released.discard("weights")

    def release_cache(self):
        self.released.add("cache")

    def restore_cache(self):
        self.released.discard("cache")

    def release_experts(self):
        self.released.add("experts")

    def restore_experts(self):
        self.released.discard("experts")

    def release_groups(self):
        self.released.add("groups")

    def restore_groups(self):
        self.released.discard("groups")


class FakeWeights:
    """Versions that a test adds; `fill` writes one into the model."""

    num_ranks = 1

    def __init__(self, fill):
        self._fill, self._versions, self._changed = fill, set(), threading.Condition()
        self.version, self.session, self.progress = None, "", 0.0

    def add(self, version):
        with self._changed:
            self._versions.add(version)
            self._changed.notify_all()

    def take(self, options):
        def found():
            version = options.version
            wanted = {version} if version is not None else self._versions - {self.version}
            if options.may_keep:
                wanted = self._versions
            return max(wanted & self._versions, default=None)

        with self._changed:
            self._changed.wait_for(
                lambda: found() is not None or options.is_over(), options.timeout_seconds
            )
            new = found()
        if new is None:
            raise TransferTimeout(f"no version in {options.timeout_seconds} s")
        if new != self.version:
            if options.before is not None:
                options.before(new)
            self._fill(new)
            self.version, self.session, self.progress = new, "fake", 1.0
        return UpdateReport(new, None, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, "fake", "nothing")

    def forget(self, reason):
        self.version = None

    def wake(self):
        with self._changed:
            self._changed.notify_all()
