"""Channels between two real sockets: order, numbers, tags, open files, deadlines, the end."""

import os
import socket
import threading
from time import monotonic

import numpy as np
import pytest

from flyweight.errors import (
    HandleGone,
    PeerLost,
    PeerRefused,
    SpecError,
    TransferTimeout,
    TransportError,
)
from flyweight.transports.channel import HEADER, PROTOCOL, Channel, Message, Messages
from flyweight.transports.wire import FILES_AT_ONCE, Wire


class Ping(Message, frozen=True):
    text: str


class Pong(Message, frozen=True):
    text: str


class Other(Message, frozen=True):
    """A message of another room."""


KNOWN = Messages(Ping, Pong)
SOON = 60.0


def soon():
    return monotonic() + SOON


@pytest.fixture
def pair():
    ends = [Channel(Wire(each), name, KNOWN) for each, name in zip(
        socket.socketpair(), ("the holder", "the reader"), strict=True)]  # fmt: skip
    for each, is_reader in zip(ends, (True, False), strict=True):
        each.authenticate(b"key", is_reader=is_reader)
    yield ends
    for each in ends:
        each.close()


def test_an_answer_repeats_the_number_of_its_request(pair):
    reader, holder = pair
    first, second = reader.ask(Ping("a"), soon()), reader.ask(Ping("b"), soon())
    for _ in range(2):
        frame = holder.next_frame(soon())
        holder.send(Pong(frame.message.text), soon(), number=frame.number)
    assert reader.answer(first, Pong, soon()).message.text == "a"
    assert reader.answer(second, Pong, soon()).message.text == "b"


def test_a_late_answer_is_not_taken_for_that_to_the_next_request(pair):
    reader, _ = pair
    number = reader.ask(Ping("a"), soon())
    with pytest.raises(TransferTimeout, match="the holder"):
        reader.answer(number, Pong, monotonic() + 0.01)
    assert reader.has_failed
    with pytest.raises((PeerLost, HandleGone)):
        reader.call(Ping("b"), Pong, soon())


def test_an_answer_to_another_request_ends_the_channel(pair):
    reader, holder = pair
    reader.ask(Ping("a"), soon())
    holder.send(Pong("x"), soon(), number=77)
    with pytest.raises(TransportError, match="77"):
        reader.answer(1, Pong, soon())
    assert reader.has_failed


def test_a_refusal_is_raised_by_its_class_and_the_channel_goes_on(pair):
    reader, holder = pair
    number = reader.ask(Ping("a"), soon())
    holder.refuse(SpecError("a box has -1 items"), holder.next_frame(soon()).number)
    with pytest.raises(SpecError, match="-1 items"):
        reader.answer(number, Pong, soon())
    number = reader.ask(Ping("b"), soon())
    holder.send(Pong("c"), soon(), number=holder.next_frame(soon()).number)
    assert reader.answer(number, Pong, soon()).message == Pong("c")


def test_what_nobody_asked_for_is_passed_on_while_an_answer_is_awaited(pair):
    reader, holder = pair
    heard = []
    reader.on_push = heard.append
    number = reader.ask(Ping("a"), soon())
    holder.send(Pong("news"), soon())
    holder.send(Pong("answer"), soon(), number=number)
    assert reader.answer(number, Pong, soon()).message.text == "answer"
    assert heard == [Pong("news")]
    holder.send(Pong("later"), soon())
    assert not reader.is_broken
    assert heard[1:] == [Pong("later")]


def test_a_peer_that_says_why_it_leaves_is_not_reported_as_dead(pair):
    reader, holder = pair
    holder.end("the publisher was closed")
    with pytest.raises(HandleGone, match="was closed"):
        reader.call(Ping("a"), Pong, soon())
    assert reader.is_broken


def test_a_peer_that_dies_is_lost(pair):
    reader, holder = pair
    holder.close()
    with pytest.raises(PeerLost):
        reader.call(Ping("a"), Pong, soon())


def test_files_come_with_their_message_and_are_not_inherited(pair):
    reader, holder = pair
    files = [os.memfd_create(f"{n}") for n in range(2 * FILES_AT_ONCE + 3)]
    for n, each in enumerate(files):
        os.write(each, b"%d" % n)
    sending = threading.Thread(target=holder.send, args=(Ping("a"), soon(), files))
    sending.start()
    frame = reader.next_frame(soon())
    sending.join()
    assert len(frame.files) == len(files)
    assert [os.pread(each, 9, 0) for each in frame.files] == [b"%d" % n for n in range(len(files))]
    assert not any(os.get_inheritable(each) for each in frame.files)
    frame.close()
    for each in files:
        os.close(each)


def test_bytes_follow_their_message(pair):
    reader, holder = pair
    parts = [np.arange(n, dtype=np.uint8) for n in (100, 0, 7)] + [np.ones(3 << 20, np.uint8)]
    number = reader.ask(Ping("a"), soon())
    sending = threading.Thread(
        target=holder.send, args=(Pong("b"), soon()), kwargs={"number": number, "parts": parts}
    )
    sending.start()
    assert reader.answer(number, Pong, soon()).message == Pong("b")
    into = np.zeros(sum(map(len, parts)), np.uint8)
    reader.receive_bytes(into, soon(), SOON)
    sending.join()
    assert (into == np.concatenate(parts)).all()
    assert holder.sent_bytes == len(into)


def test_bytes_that_stop_coming_end_the_wait(pair):
    reader, holder = pair
    holder.send(Pong("b"), soon(), parts=[np.zeros(10, np.uint8)])
    reader.next_frame(soon())
    with pytest.raises(TransferTimeout):
        reader.receive_bytes(np.zeros(11, np.uint8), soon(), 0.01)


def test_a_peer_that_takes_nothing_ends_the_wait(pair):
    _, holder = pair
    with pytest.raises(TransferTimeout):
        holder.send(Pong("b"), soon(), parts=[np.zeros(64 << 20, np.uint8)], stall_seconds=0.01)


def sealed_frame():
    """Return the bytes of the first frame that the holder of `pair` would send."""
    there, here = socket.socketpair()
    with there, here:
        sender = Channel(Wire(there), "x", KNOWN)
        sender.authenticate(b"key", is_reader=False)
        sender.send(Ping("a"), soon())
        return bytearray(here.recv(1 << 16))


@pytest.mark.parametrize("place", [0, HEADER.size + 2, -1], ids=["header", "body", "tag"])
def test_a_changed_frame_is_refused(pair, place):
    reader, holder = pair
    data = sealed_frame()
    data[place] ^= 1
    holder.wire.send([data], soon())
    with pytest.raises(TransportError):
        reader.next_frame(soon())
    assert reader.has_failed


def test_a_repeated_frame_is_refused(pair):
    reader, holder = pair
    holder.wire.send([sealed_frame() * 2], soon())
    assert reader.next_frame(soon()).message == Ping("a")
    with pytest.raises(PeerRefused):
        reader.next_frame(soon())


@pytest.mark.parametrize(
    ("header", "says"),
    [((b"fw", PROTOCOL + 1, 0, 9), "protocol"), ((b"fw", PROTOCOL, 0, 1 << 20), "1048576")],
    ids=["another protocol", "too large"],
)
def test_a_frame_is_refused_by_its_header_before_memory_is_taken(header, says):
    there, here = socket.socketpair()
    reader = Channel(Wire(here), "the holder", KNOWN)
    there.sendall(HEADER.pack(*header))
    with pytest.raises(PeerRefused, match=says):
        reader.next_frame(soon())
    there.close()
    reader.close()


def test_a_message_of_another_room_is_refused(pair):
    reader, holder = pair
    holder.send(Other(), soon())
    with pytest.raises(TransportError, match="Other"):
        reader.next_frame(soon())


def test_another_thread_ends_a_wait(pair):
    reader, _ = pair
    threading.Timer(0.05, reader.shut).start()
    with pytest.raises(PeerLost):
        reader.next_frame()


def test_a_forked_child_holds_nothing_open(pair):
    reader, holder = pair
    child = os.fork()
    if not child:
        os._exit(0 if reader.wire.fileno() < 0 and holder.wire.fileno() < 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    holder.send(Ping("a"), soon())
    assert reader.next_frame(soon()).message == Ping("a")
