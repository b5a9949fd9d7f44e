"""Encrypted connections between a publisher, its replicas and relays of other hosts."""

import pytest
import trustme

from child_processes import LIMIT, until
from flyweight.errors import FlyweightError
from flyweight.live import Publisher, Replica
from flyweight.transports.tls import Tls
from live.one_process import TOKEN, fill, holds, model, relaying, taken


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and certificates of this host that it and another one have signed."""
    directory = tmp_path_factory.mktemp("certificates")
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(directory / "authority")
    other.cert_pem.write_to_path(directory / "other authority")
    for name, signer in (("own", authority), ("other", other)):
        made = signer.issue_cert("127.0.0.1")
        made.private_key_and_cert_chain_pem.write_to_path(directory / name)
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


@pytest.mark.parametrize("mine", ["none", "no certificate", "of another authority", "distrust"])
def test_who_has_no_right_certificate_gets_nothing(certificates, mine):
    tls = {
        "none": None,
        "no certificate": Tls(authority=certificates / "authority"),
        "of another authority": both(certificates, "other"),
        "distrust": both(certificates, authority="other authority"),
    }[mine]
    sink = model()
    with (
        Publisher(
            model(3), "tcp://127.0.0.1:0", token=TOKEN, tls=both(certificates), keep="in_place"
        ) as publisher,
        pytest.raises(FlyweightError),
    ):
        publisher.publish(1)
        with Replica(
            sink, publisher.address, token=TOKEN, tls=tls, transport="read", name="engine"
        ) as replica:
            replica.update(timeout_seconds=3)
    assert holds(sink, 0)
