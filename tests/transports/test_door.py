"""The door: who gets in, and what those who do not can cost."""

import gc
import os
import socket
import threading
from contextlib import suppress
from time import monotonic

import pytest
import trustme

from flyweight.errors import FlyweightError, PeerLost, PeerRefused, SpecError
from flyweight.transports import door as door_module
from flyweight.transports.address import (
    TcpAddress,
    connected,
    connected_tcp,
    listening,
    listening_tcp,
)
from flyweight.transports.channel import (
    HEADER,
    STRANGER_BYTES,
    Challenge,
    Channel,
    Hello,
    Message,
    Messages,
    Proof,
    frame_of,
    introduce,
    proof_of,
)
from flyweight.transports.door import PLACES, Door
from flyweight.transports.tls import Tls, TlsWire
from flyweight.transports.wire import Wire


class Ping(Message, frozen=True):
    """What members say."""


KNOWN = Messages(Ping)
TOKEN = "a token"


def soon():
    return monotonic() + 60


class House:
    """A door, and the members that it has let in: each is answered once."""

    def __init__(self, tls=None):
        self.name = f"@flyweight-test-{os.getpid()}-{id(self)}"
        tcp, self.address = listening_tcp(TcpAddress("127.0.0.1", 0))
        self.door = Door([listening(self.name), tcp], TOKEN, KNOWN, tls)
        self.members, self.wires = [], []
        self.door.open(self.admit)

    def admit(self, channel):
        self.members.append(channel)
        threading.Thread(target=self.serve, args=(channel,), daemon=True).start()

    def serve(self, channel):
        with suppress(FlyweightError):  # who breaks a connection has its own test
            frame = channel.next_frame(soon())
            channel.send(Ping(), soon(), number=frame.number)

    def wire(self, tls=None, *, hostname="127.0.0.1"):
        if tls is None:
            made = Wire(connected(self.name, soon()))
        else:
            connection, _ = connected_tcp(self.address.place, soon())
            made = TlsWire(connection, tls.reader, hostname=hostname)
        self.wires.append(made)
        return made

    def join(self, token=TOKEN, wire=None):
        channel = Channel(wire or self.wire(), "the holder", KNOWN)
        introduce(channel, "someone", token, soon())
        channel.call(Ping(), Ping, soon())
        return channel

    def close(self):
        self.door.close()
        for each in (*self.members, *self.wires):
            each.close()


@pytest.fixture
def house():
    made = House()
    yield made
    made.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority's own, a holder's, a reader's, and one of another authority."""
    directory = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(directory / "authority")
    other.cert_pem.write_to_path(directory / "other")
    for name, signer in (("holder", authority), ("reader", authority), ("stranger", other)):
        made = signer.issue_cert("127.0.0.1" if name == "holder" else f"{name}.example")
        made.private_key_and_cert_chain_pem.write_to_path(directory / name)
    return directory


def tls(certificates, name, authority="authority", **options):
    own = None if name is None else certificates / name
    return Tls(certificate=own, key=own, authority=certificates / authority, **options)


def test_who_has_the_token_gets_in(house):
    assert house.join().peer == "the holder"
    assert house.members[0].peer == "reader 'someone'"


def test_another_token_is_refused_on_both_sides(house):
    with pytest.raises(PeerRefused, match="token"):
        house.join(token="another")
    # The reader has sent no proof: a holder without the token learns nothing to try.
    assert not house.members


def test_a_reader_that_guesses_is_refused_by_the_holder(house):
    channel = Channel(house.wire(), "the holder", KNOWN)
    hello = Hello(b"n" * 32, "x")
    theirs = channel.call(hello, Challenge, soon())
    with pytest.raises(PeerRefused, match="token"):
        channel.call(Proof(proof_of("wrong", "reader", hello, theirs.nonce)), Ping, soon())
    assert not house.members


def test_the_proof_of_one_connection_is_no_proof_for_the_next(house):
    first = Channel(house.wire(), "the holder", KNOWN)
    hello = Hello(b"n" * 32, "x")
    theirs = first.call(hello, Challenge, soon())
    proof = Proof(proof_of(TOKEN, "reader", hello, theirs.nonce))
    second = Channel(house.wire(), "the holder", KNOWN)
    second.call(hello, Challenge, soon())
    with pytest.raises(PeerRefused, match="token"):
        second.call(proof, Ping, soon())


def test_who_relays_the_proofs_cannot_speak_afterwards(house):
    middle = Channel(house.wire(), "the holder", KNOWN)
    hello = Hello(b"n" * 32, "x")
    theirs = middle.call(hello, Challenge, soon())
    middle.send(Proof(proof_of(TOKEN, "reader", hello, theirs.nonce)), soon(), number=2)
    # It has no key: its first frame carries no tag that the member's channel accepts.
    middle.send(Ping(), soon(), number=3)
    middle.wire.send([bytes(16)], soon())
    with pytest.raises(FlyweightError):
        middle.next_frame(soon())
    assert house.members[0].has_failed


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(b"fw", frame_of(Ping(), 0)[2], 1, STRANGER_BYTES + 1),
        HEADER.pack(b"fw", frame_of(Ping(), 0)[2], 1, 3) + b"\xc1\xc1\xc1",
        frame_of(Proof(b""), 1),
        frame_of(Ping(), 1),
        frame_of(Hello(b"", "a\nb"), 1),
    ],
    ids=["http", "too large", "no message", "wrong order", "another room", "unprintable"],
)
def test_a_stranger_who_says_something_else_is_sent_away(house, data):
    stranger = house.wire()
    stranger.send([data], soon())
    into = bytearray(1 << 16)
    with pytest.raises((EOFError, OSError)):
        stranger.receive(into, soon())
    house.join()


def test_a_stranger_has_so_many_bytes_in_all(house):
    stranger, hello = house.wire(), frame_of(Hello(b"", "x" * 2000), 1)
    with pytest.raises((EOFError, OSError)):
        stranger.send([hello], soon())
        stranger.receive(bytearray(len(frame_of(Challenge(b"0" * 32, b"0" * 32), 1))), soon())
        stranger.send([frame_of(Proof(b"x" * 2100), 1)], soon())
        stranger.receive(bytearray(1 << 20), soon())


def test_a_silent_stranger_is_sent_away_in_time(house, monkeypatch):
    monkeypatch.setattr(door_module, "ADMIT_SECONDS", 0.1)
    stranger = house.wire()
    with pytest.raises(EOFError):
        stranger.receive(bytearray(1 << 16), soon())


def test_silent_strangers_keep_no_reader_out(house):
    silent = [house.wire() for _ in range(PLACES + 36)]
    house.join()
    gone = sum(each.has_input(deadline=0.0) for each in silent)
    assert gone >= 36  # the oldest were ended for those that came later
    for each in silent:
        each.close()


def test_what_follows_the_proof_in_one_packet_is_the_members(house):
    wire = house.wire()
    hello = Hello(b"n" * 32, "x")
    wire.send([frame_of(hello, 1)], soon())
    channel = Channel(wire, "the holder", KNOWN)
    theirs = channel.next_frame(soon()).message
    proof = frame_of(Proof(proof_of(TOKEN, "reader", hello, theirs.nonce)), 2)
    channel.authenticate(proof_of(TOKEN, "key", hello, theirs.nonce), is_reader=True)
    wire.send([proof, channel._sealed(Ping(), 3)], soon())
    assert channel.answer(3, Ping, soon())


def test_a_door_out_of_files_opens_again(house, monkeypatch):
    """Here the limit cannot be raised; `live/test_limits.py` has doors that raise it."""
    import resource

    monkeypatch.setattr("flyweight.host.raise_file_limit", lambda: False)
    monkeypatch.setattr(door_module, "raise_file_limit", lambda: False)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = house.wire()
    there, here = socket.socketpair()
    gc.collect()  # else files that earlier tests have left may be closed meanwhile
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        with pytest.raises((PeerLost, OSError)):
            for _ in range(4):
                house.wire()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    house.join()
    for each in (waiting, there, here):
        each.close()


def test_a_closed_door_ends_strangers_and_listens_no_more(house):
    stranger = house.wire()
    house.join()
    house.door.close()
    with pytest.raises((EOFError, OSError)):
        stranger.receive(bytearray(1), soon())
    with pytest.raises(PeerLost):
        house.wire()


def test_nothing_that_is_sent_is_readable_on_the_line(certificates):
    house = House(tls(certificates, "holder"))
    seen, (near, far) = bytearray(), socket.socketpair()
    real, _ = connected_tcp(house.address.place, soon())

    def pump(source, sink):
        with suppress(OSError):  # the test is over
            while data := source.recv(1 << 16):
                seen.extend(data)
                sink.sendall(data)

    for ends in ((far, real), (real, far)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
    wire = TlsWire(near, tls(certificates, "reader").reader, hostname="127.0.0.1")
    wire.shake_hands(soon())
    channel = house.join(wire=wire)
    house.join()  # on this host nothing is encrypted
    assert len(seen) > 1000
    assert b"someone" not in seen
    assert b"Ping" not in seen
    for each in (channel, near, far, real, house):
        each.close()


def test_a_reader_refuses_a_certificate_for_another_host(certificates):
    house = House(tls(certificates, "reader"))  # of this authority, and for reader.example
    with pytest.raises(PeerRefused, match="tls="):
        house.wire(tls(certificates, "reader")).shake_hands(soon())
    house.wire(tls(certificates, "reader", check_hostname=False)).shake_hands(soon())
    house.close()


def test_files_that_are_no_certificates_are_named(tmp_path):
    (tmp_path / "x").write_text("x")
    with pytest.raises(SpecError, match="x'"):
        Tls(certificate=tmp_path / "x", key=tmp_path / "x")
    with pytest.raises(SpecError, match="key"):
        Tls(certificate=tmp_path / "x")
    with pytest.raises(SpecError, match="missing"):
        Tls(authority=tmp_path / "missing")
