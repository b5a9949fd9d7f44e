"""Trainer ranks for tests: processes that each hold a part of a model whose bytes tell its version."""

import importlib
import os
import signal
import threading
import time

import numpy as np

import flyweight as fw
from flyweight.live import frames, messages
from flyweight.live.connection import Connection
from versioned_models import weights

NBYTES = 1 << 16
CUTS = {
    "embed": [(0, 60), (60, 61), (61, 256)],
    "layer.1.w": [None, (0, 1000), (1000, 2048)],
    "norm": [(0, 7), None, (0, 7)],
    "layer.0.w": [(0, 37), None, None],
    "layer.0.t": [None, (0, 30), None],
    "scalar": [None, (), None],
    "empty": [None, None, (0, 0)],
}
"""The rows of each tensor on each of three ranks; None where a rank has no part."""


def part_of(rank, version):
    """Return what a rank of three holds of the weights of a version."""
    found = {}
    for name, array in weights(version, NBYTES).items():
        rows = CUTS[name][rank]
        if rows is None:
            continue
        if rows in ((), (0, len(array) if array.ndim else 0)):
            found[name] = array.copy(order="K")
        else:
            part = array[slice(*rows)].copy()
            found[name] = fw.Sharded(part, array.shape, (rows[0], *(0,) * (array.ndim - 1)))
    return found


def assign_part(model, rank, version):
    """Overwrite a rank's part in place with that of a version."""
    for name, leaf in part_of(rank, version).items():
        if isinstance(leaf, fw.Sharded):
            model[name].tensor[...] = leaf.tensor
        else:
            model[name][...] = leaf


class Publishes:
    """What a rank does: makes a publisher, publishes, and tells the test how each call ended."""

    def __init__(self, address, rank, num_ranks=3, **options):
        self.rank, self.publisher = rank, None
        self.address, self.options = address, {"rank": rank, "num_ranks": num_ranks, **options}

    def run(self, pipe):
        """Carry out what the test sends, until it sends None."""
        while (command := pipe.recv()) is not None:
            name, arguments, options = command
            started = time.monotonic()
            try:
                found = getattr(self, name)(*arguments, **options)
            except Exception as error:
                found = error
            pipe.send((name, found, time.monotonic() - started))

    def start(self):
        """Do nothing: the answer says that this process runs, so that its start costs no deadline."""

    def make(self, model=None, address=None, **options):
        """Make a publisher of this rank's part, or of other tensors."""
        self.model = part_of(self.rank, 0) if model is None else model
        options = {**self.options, **options}
        self.publisher = fw.Publisher(self.model, address or self.address, **options)

    def publish(self, version, **options):
        if "embed" in self.model:
            assign_part(self.model, self.rank, version)
        try:
            report = self.publisher.publish(version, **options)
        finally:
            self.has_ended = self.disarm()
        return report.version, [(each.name, str(each.error)) for each in report.failed]

    def replace(self, version):
        """Put other tensors in the place of this rank's."""
        for name, leaf in part_of(self.rank, version).items():
            self.model[name] = leaf

    def change_shape(self):
        self.model["scalar" if self.rank == 1 else "norm"] = np.zeros(3)

    def lease(self, version, **options):
        """Publish in the background; say when the weights may change, and how it ended."""
        assign_part(self.model, self.rank, version)
        lease = self.publisher.publish(version, background=True, **options)
        lease.wait_copied()
        assign_part(self.model, self.rank, 0)
        return lease.wait().version

    def close_amid(self, version, seconds):
        """Close a publisher that waits for rank 0 or for a replica in the background."""
        timer = threading.Timer(seconds, self.publisher.close)
        timer.start()
        try:
            return self.publisher.publish(version, background=True).wait()
        finally:
            timer.join()

    def fork(self, version):
        """Publish in a child, which may not; return its error, and then publish here."""
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                self.publisher.publish(version)
            except Exception as error:
                os.write(writer, str(error).encode())
            self.publisher.close()
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writer)
        with open(reader, "rb") as file:
            return file.read().decode()

    def memory(self):
        """Return how much shared memory files of this process hold open that it made or passes on."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                    found += os.stat(f"/proc/self/fd/{name}").st_blocks * 512
            except OSError:
                continue
        return found

    def close(self):
        if self.publisher is not None:
            self.publisher.close()

    def die_at(self, step):
        """Kill this process when it calls a function of flyweight.live."""
        module, name = step.split(".")
        found = importlib.import_module(f"flyweight.live.{module}")
        setattr(found, name, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))

    def was_stopped(self):
        return self.has_ended

    def arm(self, kind, number, signal_number):
        """Kill or stop this process at a message of the next publish."""
        self.disarm = end_at(kind, number, signal_number)

    def disarm(self):
        """Forget the signal; return whether it was sent."""


def source_rank(address, rank, options, pipe):
    Publishes(address, rank, **options).run(pipe)


def end_at(kind, number, signal_number):
    """Kill or stop this process before or after its nth message, or as it gets its nth."""
    count, is_sent = 0, False
    send = Connection.send

    def end():
        nonlocal is_sent
        is_sent = True
        os.kill(os.getpid(), signal_number)

    def counted_send(self, message, to=b""):
        nonlocal count
        if isinstance(message, messages.Tick):
            return send(self, message, to)
        count += 1
        if kind == "before" and count - 1 == number:
            end()
        send(self, message, to)
        if kind == "after" and count - 1 == number:
            time.sleep(0.02)  # let it go out; where it does not, this is the end before it
            end()
        return None

    def counted(decode):
        def decoded(frame):
            nonlocal count
            message = decode(frame)
            if not isinstance(message, (messages.Tick, messages.Going)):
                count += 1
                if count - 1 == number:
                    end()
            return message

        return decoded

    def disarm():
        nonlocal number
        number = -1
        return is_sent

    if kind == "received":
        frames.decode_from_replica = counted(frames.decode_from_replica)
        frames.decode_from_publisher = counted(frames.decode_from_publisher)
    else:
        Connection.send = counted_send
    return disarm


SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def holds_whole(engine, version):
    wanted = weights(version, NBYTES)
    return all(np.asarray(engine[name]).tobytes() == wanted[name].tobytes() for name in wanted)
