"""Complete small implementations of ports; the contracts of their ports hold them too."""

from contextlib import nullcontext

import numpy as np

from flyweight.errors import StoreError


class MemoryStore:
    """A store of one file in memory, which notices when somebody reads outside of it."""

    def __init__(self, data: bytes, name: str = "file") -> None:
        self._data, self._name = data, name

    @property
    def place(self):
        return "memory"

    def names(self):
        return [self._name]

    def size(self, name):
        if name != self._name:
            raise StoreError(f"no file {name!r} in memory")
        return len(self._data)

    def read(self, name, offset, nbytes):
        assert 0 <= offset <= offset + nbytes <= self.size(name), "read outside the file"
        return self._data[offset : offset + nbytes]

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


class FakeRendezvousStore:
    """A store store in one process."""

    def __init__(self):
        self._texts = {}

    def set(self, key, text, deadline):
        self._texts[key] = text

    def get(self, key, deadline):
        return self._texts.get(key)
