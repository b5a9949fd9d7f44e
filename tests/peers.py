"""Peers that say what they like: real sockets and the real protocol, and none of its manners."""

import mmap
import os
from pathlib import Path
from time import monotonic

import numpy as np
import zmq

from child_processes import LIMIT
from flyweight.digest import Digest
from flyweight.host import birth_of
from flyweight.live import frames, messages
from flyweight.plans import tables as message_tables
from flyweight.plans.copy_table import BoxTable
from flyweight.spec.box import Box
from flyweight.transports.fd_passing import FdServer
from flyweight.transports.shared_memory import SharedMemoryHandle

SESSION = "0123456789abcdef"


class FakeReplica:
    """A replica's end of the control channel; it has no line to the door."""

    def __init__(self, address):
        directory = address.removeprefix("unix:")
        self.token = None
        if os.path.exists(f"{directory}/token"):
            with open(f"{directory}/token") as file:
                self.token = file.read()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.connect(f"ipc://{directory}/control")

    def say(self, message):
        self.send(frames.encode(message))

    def send(self, *frames):
        self._socket.send_multipart(frames)

    def hear(self, timeout=LIMIT):
        """Return the next message, whatever it is."""
        assert self._socket.poll(1000 * timeout), "no answer"
        return frames.decode_from_publisher(self._socket.recv())

    def has_heard(self):
        """True if something was said that `hear` has not returned yet."""
        return bool(self._socket.poll(100))

    def hear_of(self, *kinds, timeout=LIMIT):
        """Return the next message of some kinds; what else is said meanwhile is left."""
        return _of_kind(self.hear, kinds, timeout)

    def join(self, name="fake", **hello):
        """Say hello, and want every tensor whole."""
        self.say(messages.Hello(self.token, name, os.getpid(), **hello))
        told = self.hear_of(messages.Welcome).tensors
        boxes = [(n, Box.whole(spec.shape)) for n, spec in enumerate(told.specs().values())]
        self.say(want(told, boxes))
        return self.hear_of(messages.Agreed)

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self._socket.close()
        self._context.term()


class FakePublisher:
    """A publisher of one tensor 'w' of bytes, which lies in a file that replicas map."""

    def __init__(self, address, content, *, silence_seconds=2 * LIMIT):
        directory = Path(address.removeprefix("unix:"))
        directory.mkdir(mode=0o700, exist_ok=True)
        token = directory / "token.draft"
        token.write_text("t" * 32)
        token.chmod(0o600)
        token.rename(directory / "token")  # whole at once, as a publisher does: a replica may look
        self.content = np.frombuffer(content, np.uint8)
        self.silence_seconds = silence_seconds
        self._door = FdServer(directory / "door", token="t" * 32)
        file = os.memfd_create("fake", os.MFD_CLOEXEC)
        os.write(file, content)
        self.key = self._door.offer(file)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.bind(f"ipc://{directory}/control")
        self._peer = b""

    @property
    def digests(self):
        """What a replica that copied everything tells."""
        return digests_of(self.content)

    def say(self, message):
        self._socket.send_multipart([self._peer, frames.encode(message)])

    def hear(self, timeout=LIMIT):
        assert self._socket.poll(1000 * timeout), "nobody speaks"
        self._peer, frame = self._socket.recv_multipart()
        return frames.decode_from_replica(frame)

    def has_heard(self):
        return bool(self._socket.poll(100))

    def hear_of(self, *kinds, timeout=LIMIT):
        return _of_kind(self.hear, kinds, timeout)

    def welcome(self, **changes):
        """Greet a replica, and agree with what it wants."""
        self.hear_of(messages.Hello)
        told = tensors(("w", "u8", (len(self.content),)))
        said = {"session": SESSION, "tensors": told, "tied": {}, "version": None}
        said["silence_seconds"] = self.silence_seconds
        said["pid"], said["started"] = birth_of()
        self.say(messages.Welcome(**{**said, **changes}))

    def agree(self):
        self.hear_of(messages.Want)
        self.say(agreed([(0, Box.whole((len(self.content),)))]))

    def begin(
        self, *, number=1, version=5, digests=None, num_buckets=0, should_verify=True, **handle
    ):
        """Wait until a replica asks, and begin a round in which it reads the file.

        It maps the file, or with `num_buckets` reads as many buckets that lie in it.
        """
        ask = self.hear_of(messages.Ask)
        said = {"session": SESSION, "key": self.key, "offset": 0, "nbytes": len(self.content)}
        shown = SharedMemoryHandle(**{**said, **handle})
        size = len(self.content) // max(num_buckets, 1)
        starts, ones = [n * size for n in range(num_buckets)], [] if num_buckets else [0]
        packed = message_tables.packed
        memory = messages.Memory(
            () if num_buckets else (shown,),
            message_tables.Places(
                1, packed(ones), packed(ones), packed(ones), packed([1] * len(ones))
            ),
            {0: shown} if num_buckets else {},
            dict.fromkeys(range(num_buckets), 0),
            message_tables.Pieces(
                1,
                packed(range(num_buckets)),
                packed([0] * num_buckets),
                packed(starts),
                packed([size] * num_buckets),
                packed(starts),
            ),
        )
        self.say(
            messages.Begin(
                round=number,
                ask=ask.ask,
                version=version,
                parent=None,
                origin="published",
                strategy="mapped",
                should_verify=should_verify,
                digest_kind="xxh3",
                digests=digests,
                lists=number,
                memory=memory,
                values={},
                may_commit_alone=digests is not None,
            )
        )

    def close(self):
        """Go without a word, as if killed."""
        self._socket.close(0)
        self._context.term()
        self._door.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()


def shared(content):
    """Return a copy of bytes in memory that other processes can map where it lies."""
    file = os.memfd_create("model", os.MFD_CLOEXEC)
    os.ftruncate(file, len(content))
    array = np.frombuffer(mmap.mmap(file, len(content)), np.uint8)
    os.close(file)  # the mapping has one of its own
    array[:] = content
    return array


def digests_of(*contents):
    """Return the digests of bytes that lie on the host at both ends, as they are sent."""
    found = []
    for content in contents:
        digest = Digest(len(content), "xxh3")
        digest.add(0, content)
        found.append(digest.value())
    return np.array(found, np.uint64).tobytes()


def tensors(*rows):
    """Return the table of tensors: (name, dtype, shape) each."""
    names = tuple(name for name, _, _ in rows)
    kinds = tuple(message_tables.Kind(dtype, shape) for _, dtype, shape in rows)
    return message_tables.Tensors(names, kinds, message_tables.packed(range(len(rows))))


def agreed(pairs):
    """Return the blocks of a publisher of one rank on the host: (tensor, box) each."""
    zeros = bytes(8 * len(pairs))
    return messages.Agreed(boxes(pairs), zeros, ("",), zeros)


def boxes(pairs):
    """Return boxes as they are sent, each with the number of its tensor."""
    return message_tables.Boxes.of(BoxTable.of(pairs))


def want(tensors, pairs, *, may_leave=False):
    """Return what a replica wants: boxes of these tensors, on the host."""
    return messages.Want(
        tensors, boxes(pairs), ("",), message_tables.packed([0] * len(pairs)), may_leave
    )


def _of_kind(hear, kinds, timeout):
    deadline = monotonic() + timeout
    while not isinstance(message := hear(max(deadline - monotonic(), 0.001)), kinds):
        pass
    return message
