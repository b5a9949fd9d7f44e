"""Encrypted connections between a publisher, its replicas and relays of other hosts."""

import pytest

from child_processes import LIMIT, until
from flyweight.errors import SpecError, TransportError
from flyweight.live import Publisher, Relay, Replica
from flyweight.transports.tls import Tls
from live.certificates import made_by_one_authority
from live.one_process import TOKEN, fill, holds, model, relaying, taken


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and certificates of this host that it and another one have signed."""
    directory = tmp_path_factory.mktemp("certificates")
    own, authority = made_by_one_authority(directory / "one", "127.0.0.1")
    other, other_authority = made_by_one_authority(directory / "two", "127.0.0.1")
    for name, path in {
        "own": own, "authority": authority, "other": other, "other authority": other_authority,
    }.items():  # fmt: skip
        path.rename(directory / name)
    return directory


def both(certificates, name="own", authority="authority"):
    """Return a certificate to show, and the authority of those that are accepted."""
    own = certificates / name
    return Tls(certificate=own, key=own, authority=certificates / authority)


def test_versions_come_encrypted_and_are_passed_on(certificates):
    tls, source, sinks = both(certificates), model(), [model(), model()]
    with Publisher(source, "tcp://127.0.0.1:0", token=TOKEN, tls=tls) as publisher:
        options = {"token": TOKEN, "tls": tls, "transport": "read"}
        with (
            Replica(sinks[0], publisher.address, name="a", **options) as first,
            Replica(sinks[1], publisher.address, name="b", **options) as second,
        ):
            assert first.serves_at
            for version in (1, 2):
                fill(source, version)
                report, _ = taken(publisher, version, first, second)
                assert not report.failed
                assert all(holds(each, version) for each in sinks)


def test_a_relay_follows_an_encrypted_publisher(certificates, tmp_path):
    tls, source, sink = both(certificates), model(3), model()
    with (
        Publisher(source, "tcp://127.0.0.1:0", token=TOKEN, tls=tls) as publisher,
        relaying(publisher.address, f"unix:{tmp_path}/relay", tls=tls) as relay,
    ):
        until(lambda: publisher.waiting)
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
        with Replica(sink, relay.address, token=TOKEN, name="engine") as replica:
            replica.update(timeout_seconds=LIMIT)
    assert holds(sink, 3)


def test_a_relay_without_a_certificate_is_refused_before_it_runs(certificates, tmp_path):
    tls = Tls(authority=certificates / "authority")
    for address, on in [
        ("tcp://127.0.0.1:9", f"unix:{tmp_path}"),
        (f"unix:{tmp_path}", "tcp://127.0.0.1:0"),
    ]:
        with pytest.raises(SpecError, match="certificate"):
            Relay(address, on, token=TOKEN, tls=tls)


@pytest.mark.parametrize("mine", ["none", "no certificate", "of another authority", "distrust"])
def test_who_has_no_right_certificate_gets_nothing(certificates, mine):
    tls = {
        "none": None,
        "no certificate": Tls(authority=certificates / "authority"),
        "of another authority": both(certificates, "other"),
        "distrust": both(certificates, authority="other authority"),
    }[mine]
    sink, options = model(), {"transport": "read", "serve": False, "name": "engine"}
    with Publisher(
        model(3), "tcp://127.0.0.1:0", token=TOKEN, tls=both(certificates), keep="in_place"
    ) as publisher:
        publisher.publish(1)
        with (
            pytest.raises(TransportError),
            Replica(sink, publisher.address, token=TOKEN, tls=tls, **options) as replica,
        ):
            replica.update(timeout_seconds=3)
    assert holds(sink, 0)
