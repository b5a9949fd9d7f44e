"""Keys for encrypted connections: their files, and what is refused as a key, and handshakes."""

import errno
import os
from contextlib import closing

import pytest
import zmq

import flyweight as fw
from child_processes import LIMIT
from commands import flyweight
from flyweight.errors import PeerRefused, SpecError, StoreError
from flyweight.live.connection import Connection
from flyweight.live.curve_keys import CurveClient, CurveKeys, CurveServer, Handshakes
from versioned_models import weights

SERVER, CLIENT, OTHER = CurveKeys.make(), CurveKeys.make(), CurveKeys.make()


def test_keys_come_back_from_their_files(tmp_path):
    path = CLIENT.write(tmp_path / "keys", "engine")
    assert CurveKeys.read(path) == CLIENT
    assert CurveKeys.read_public(path.with_suffix(".pub")) == CLIENT.public
    modes = {each.name: each.stat().st_mode & 0o777 for each in (tmp_path / "keys").iterdir()}
    assert modes["engine.key"] == 0o600
    assert sorted(modes) == ["engine.key", "engine.pub"]  # and no drafts
    assert CLIENT.secret not in path.with_suffix(".pub").read_text()


def test_a_secret_is_never_shown():
    server, client = CurveServer(SERVER, [CLIENT.public]), CurveClient(SERVER.public, CLIENT)
    assert SERVER.secret not in repr(server) + str(SERVER)
    assert CLIENT.secret not in repr(client) + str(client)
    assert CLIENT.public in repr(client)


@pytest.mark.parametrize("suffix", [".key", ".pub"])
def test_files_are_not_overwritten_and_a_pair_is_written_whole(tmp_path, suffix):
    mine = tmp_path / f"flyweight{suffix}"
    mine.write_text("mine")
    with pytest.raises(StoreError, match="overwritten"):
        CLIENT.write(tmp_path)
    assert mine.read_text() == "mine"
    assert os.listdir(tmp_path) == [mine.name]


def test_keys_that_others_can_read_or_change_are_refused(tmp_path):
    path = CLIENT.write(tmp_path)
    public = path.with_suffix(".pub")
    path.chmod(0o640)
    public.chmod(0o664)
    with pytest.raises(PeerRefused, match="chmod 600"):
        CurveKeys.read(path)
    with pytest.raises(PeerRefused, match="chmod go-w"):
        CurveKeys.read_public(public)


PAIR = f"public {CLIENT.public}\nsecret {CLIENT.secret}\n"
NOT_KEYS = {
    "empty": b"",
    "a public key": CLIENT.public.encode(),
    "the other order": f"secret {CLIENT.secret}\npublic {CLIENT.public}\n".encode(),
    "another secret": PAIR.replace(CLIENT.secret, OTHER.secret).encode(),
    "too short": PAIR[:-2].encode(),
    "more lines": (PAIR + PAIR).encode(),
    "other characters": PAIR.replace(CLIENT.public[:2], "é").encode(),
    "a number over 32 bits": f"public {'#' * 40}\nsecret {CLIENT.secret}\n".encode(),
    "binary": bytes(range(256)),
    "endless": PAIR.encode() + b"\n" * (1 << 20),
}


@pytest.mark.parametrize("kind", NOT_KEYS)
def test_a_file_with_something_else_is_refused_in_words_without_its_content(tmp_path, kind):
    path = tmp_path / "engine.key"
    path.write_bytes(NOT_KEYS[kind])
    path.chmod(0o600)
    with pytest.raises(PeerRefused, match="key file '.*engine.key'") as refused:
        CurveKeys.read(path)
    assert not any(key.secret in str(refused.value) for key in (CLIENT, OTHER))
    if kind != "a public key":
        with pytest.raises(PeerRefused, match="public key file '.*engine.key'"):
            CurveKeys.read_public(path)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.key", 0o600)
    for name, text in (("pipe.key", "is not a regular file"), ("no.key", "flyweight keys writes")):
        with pytest.raises(PeerRefused, match=text):
            CurveKeys.read(tmp_path / name)


def connection(endpoint, **options):
    return Connection(
        endpoint,
        on_frame=lambda sender, frame: None,
        on_heartbeat=lambda now: None,
        heartbeat_seconds=1,
        **options,
    )


def replica_with(curve):
    connection("ipc:///nowhere", is_publisher=False, curve=curve)


def listens_with(curve):
    with closing(connection("inproc://unused", is_publisher=True)) as made:
        made.listen("tcp://127.0.0.1:0", curve)


WRONG = {
    "a short key": lambda: CurveClient(SERVER.public[1:]),
    "a number": lambda: CurveClient(7),
    "bytes": lambda: CurveServer(SERVER, [CLIENT.public.encode()]),
    "one text for a list": lambda: CurveServer(SERVER, CLIENT.public),
    "a secret for a public key": lambda: CurveKeys(SERVER.secret, SERVER.secret),
    "no keys": lambda: CurveServer(SERVER.public),
    "no pair": lambda: CurveClient(SERVER.public, CLIENT.public),
    "a path for a name": lambda: SERVER.write("/tmp", "../keys"),
    "a server's at a replica": lambda: replica_with(CurveServer(SERVER)),
    "a client's at a publisher": lambda: listens_with(CurveClient(SERVER.public)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_keys_in_code_are_errors_in_words(kind):
    with pytest.raises(SpecError):
        WRONG[kind]()


def test_the_command_writes_keys(tmp_path):
    told = flyweight("keys", tmp_path / "k", "--name", "trainer", "--json")
    assert CurveKeys.read(tmp_path / "k" / "trainer.key").public == told["public"]
    assert told["key"] == str(tmp_path / "k" / "trainer.key")
    text = flyweight("keys", tmp_path / "k", "--name", "trainer", code=6)
    assert "not overwritten" in " ".join(text.split())


def test_one_handshake_without_an_end_is_no_refusal_but_two_are():
    closed = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EPIPE)
    for curve in (None, CurveClient(SERVER.public)):
        handshakes = Handshakes(curve)
        assert handshakes.refusal(*closed) is None  # a publisher that is being closed
        assert handshakes.refusal(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, errno.EAGAIN) is None
        assert handshakes.refusal(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0) is None
        assert handshakes.refusal(*closed) is None
        assert "ends the handshake" in handshakes.refusal(*closed)


@pytest.fixture
def encrypted(monkeypatch):
    """A publisher for other hosts that encrypts; replicas here connect as if on another one."""
    monkeypatch.setenv("FLYWEIGHT_HOST", "here")
    curve = CurveServer(SERVER, [CLIENT.public])
    with fw.Publisher(weights(1), "tcp://127.0.0.1:0", token="secret", curve=curve) as publisher:
        monkeypatch.setenv("FLYWEIGHT_HOST", "elsewhere")
        yield publisher


@pytest.mark.parametrize(
    ("curve", "why"),
    [
        (None, "public key"),
        (CurveClient(OTHER.public, CLIENT), "server key"),
        (CurveClient(SERVER.public, OTHER), "does not admit"),
    ],
)
def test_a_replica_whose_keys_do_not_fit_is_refused(encrypted, curve, why):
    with pytest.raises(PeerRefused, match=why):
        fw.Replica(weights(2), encrypted.address, token="secret", curve=curve)


def test_a_replica_whose_keys_fit_takes_a_version(encrypted, threads):
    curve, model = CurveClient(SERVER.public, CLIENT), weights(2)
    with fw.Replica(model, encrypted.address, token="secret", curve=curve) as replica:
        update = threads.submit(replica.update, timeout_seconds=LIMIT)
        assert not encrypted.publish(1, num_replicas=1).failed
        assert update.result(LIMIT).strategy == "network"
        assert all((model[name] == array).all() for name, array in weights(1).items())


def test_keys_are_for_addresses_of_other_hosts(address):
    with pytest.raises(SpecError, match="curve="):
        fw.Publisher(weights(1), address, curve=CurveServer(SERVER))
    with pytest.raises(SpecError, match="curve="):
        fw.Replica(weights(1), address, curve=CurveClient(SERVER.public))
