"""The strategy `rsync` between two hosts: named versions, checksums, memory and secrets (C18)."""

from contextlib import contextmanager

import paddle
import pytest
from fastdeploy_nets import Net, config, holds

import flyweight as fw
from flyweight.engines.fastdeploy import DynamicWeightManager
from flyweight.engines.fastdeploy_config import FastDeployOptions
from flyweight.errors import PeerRefused, SpecError, TransportError, VersionError
from live.certificates import made_by_one_authority
from netns import two_hosts

TOKEN = "3f9c2a7be0d14c5897aa61c0ffee4242"
MIB = 1 << 20


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as made:
        yield made


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


def trainer(ip, make_model, first, tls, options, pipe):
    """Publish a version, and another one each time the test asks."""
    model, version = make_model(first), first
    if tls is not None:
        options["tls"] = fw.Tls(**tls)
    with fw.Publisher(model, f"tcp://{ip}:0", token=TOKEN, keep="memory", **options) as publisher:
        while True:
            model.set_state_dict(make_model(version).state_dict())
            publisher.publish(version)
            pipe.send(publisher.address)
            version = pipe.recv()


@contextmanager
def publishing(hosts, version, make_model=Net, *, tls=None, **options):
    """Yield the publisher's process and its address."""
    with hosts.a.child(trainer, hosts.a.ip, make_model, version, tls, options) as child:
        yield child, child.told()


def takes_named_versions(told, store, pipe):
    target = Net()
    with DynamicWeightManager(told, target, 0) as manager:
        first = (manager.version, holds(target, 7))
        pipe.send("loaded")
        pipe.recv()  # the trainer has published the next one
        answer = manager.update_weights_by_rdma("step-9", verify_checksum=True)
        source = manager._weights._report
        with pytest.raises(VersionError, match="version 8"):
            manager.update_weights_by_rdma(8)
        kept = (manager.version, manager.health, holds(target, 9))
        fw.save(Net(8), store, version=8)
        manager.update_weights_by_rdma(8)  # from files, if the publisher has another version
        return first, answer["version"], source, kept, (manager.version, holds(target, 8))


def test_a_named_version_comes_over_the_network_or_is_refused(hosts, tmp_path, token_file):
    """C18: exactly the version that was named, verified, from a trainer on another host."""
    certificate, authority = made_by_one_authority(tmp_path / "tls", hosts.a.ip)
    (tmp_path / "version.yaml").write_text("step: 7")
    told = config(tmp_path, "rsync")
    tls = {"certificate": certificate, "key": certificate}
    with publishing(hosts, 7, tls=tls) as (child, address):
        told.load_config.rsync_config = {
            "address": address, "token_file": token_file, "tls_authority": authority,
            "store": tmp_path / "run",
        }  # fmt: skip
        with hosts.b.child(takes_named_versions, told, tmp_path / "run") as engine:
            assert engine.told() == "loaded"
            child.send(9)
            child.told()
            engine.send("go")
            first, answered, report, kept, last = engine.result()
    assert first == (7, True)
    assert (answered, report.version, report.transport) == ("step-9", 9, "read")
    assert report.verified == "live"
    assert kept == (9, "serving", True)
    assert last == (8, True)


def refuses_unverified(told, pipe):
    target = Net()
    with DynamicWeightManager(told, target, 0) as manager:
        with pytest.raises(VersionError, match="checksums"):
            manager.update_weights_by_rdma(1, verify_checksum=True)
        pipe.send("refused")
        pipe.recv()
        with pytest.raises(VersionError, match="checksums"):
            manager.update_weights_by_rdma(2, verify_checksum=True)
        return manager.version, manager.health, holds(target, 1)


def test_checksums_that_are_asked_for_are_not_skipped_on_the_network(hosts, tmp_path):
    """C18: an unverified version is refused before a byte of it is written."""
    (tmp_path / "version.yaml").write_text("step: 1")
    with publishing(hosts, 1, verify=False) as (child, address):
        told = config(tmp_path, "rsync", address=address, token=TOKEN)
        with hosts.b.child(refuses_unverified, told) as engine:
            assert engine.told() == "refused"
            child.send(2)
            child.told()
            engine.send("go")
            assert engine.result() == (1, "serving", True)


class LargeNet(paddle.nn.Layer):
    """156 MiB in a few tensors, the largest of them of several buckets."""

    def __init__(self, version=0):
        super().__init__()
        for number, mib in enumerate((16, 5, 3) * 6 + (12,)):
            value = paddle.full([mib * MIB // 4], float(version), "float32")
            self.register_buffer(f"part{number}", value)


def resident_bytes(field):
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


def measures_growth(told, pipe):
    target = LargeNet()
    model_bytes = sum(each.size * each.element_size() for each in target.state_dict().values())
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here on
    before = resident_bytes("VmRSS")
    with DynamicWeightManager(told, target, 0) as manager:
        pipe.send("loaded")
        pipe.recv()
        manager.update_weights_by_rdma(2, verify_checksum=True)
        grown = resident_bytes("VmHWM") - before
        is_right = all(bool((each == 2).all()) for each in target.state_dict().values())
        return model_bytes, grown, is_right


@pytest.mark.check
def test_an_update_from_another_host_takes_one_copy_of_the_model_on_the_host(hosts, tmp_path):
    """C18: it is fetched and verified before the pause, and copied from there."""
    (tmp_path / "version.yaml").write_text("step: 1")
    with publishing(hosts, 1, LargeNet) as (child, address):
        told = config(tmp_path, "rsync", address=address, token=TOKEN)
        with hosts.b.child(measures_growth, told) as engine:
            assert engine.told() == "loaded"
            child.send(2)
            child.told()
            engine.send("go")
            model_bytes, grown, is_right = engine.result()
    assert is_right
    assert model_bytes == 156 * MIB
    assert grown < 156 * MIB + 40 * MIB  # Python and threads need the rest


def has_little_room(told, pipe):
    with pytest.raises(TransportError, match="staging_bytes") as caught:
        DynamicWeightManager(told, Net(), 0)
    return str(caught.value)


def test_a_version_that_does_not_fit_into_staging_is_refused(hosts, tmp_path):
    """C18: before it is fetched, with both values."""
    (tmp_path / "version.yaml").write_text("step: 1")
    with publishing(hosts, 1) as (_, address):
        told = config(tmp_path, "rsync", address=address, token=TOKEN, staging_bytes=100)
        with hosts.b.child(has_little_room, told) as engine:
            assert " may take 100;" in engine.result()


def test_files_without_some_parameters_are_not_for_a_publisher(tmp_path, address):
    (tmp_path / "version.yaml").write_text("step: 1")
    with pytest.raises(SpecError, match="partial_over"):
        told = config(tmp_path, "rsync", address=address, partial_over=1)
        DynamicWeightManager(told, Net(), 0)


def test_secrets_of_a_publisher_on_another_host_are_named_when_they_are_missing(
    tmp_path, token_file
):
    """C18: an engine that cannot be admitted says which option is wrong."""
    address = "tcp://127.0.0.1:9"
    (tmp_path / "version.yaml").write_text("step: 1")

    def start(**options):
        DynamicWeightManager(config(tmp_path, "rsync", address=address, **options), Net(), 0)

    with pytest.raises(SpecError, match="token_file"):
        start()
    with pytest.raises(SpecError, match="both"):
        start(token=TOKEN, token_file=token_file)
    with pytest.raises(PeerRefused, match="token file"):
        start(token_file=tmp_path / "none")
    with pytest.raises(SpecError, match="authority"):
        start(token=TOKEN, tls_authority=tmp_path / "none.pem")
    with pytest.raises(SpecError, match="key"):
        start(token=TOKEN, tls_certificate=tmp_path / "host.pem")
    with pytest.raises(SpecError, match="tcp://"):
        FastDeployOptions(address="tcp://trainer").secret()
    token_file.chmod(0o644)
    with pytest.raises(PeerRefused, match="644"):
        start(token_file=token_file)


def test_a_wrong_token_is_refused_and_no_files_are_read_instead(tmp_path):
    """C18: a fallback to files would hide that the engine is not admitted."""
    fw.save(Net(1), tmp_path, version=1)
    (tmp_path / "version.yaml").write_text("step: 1")
    with fw.Publisher(Net(1), "tcp://127.0.0.1:0", token=TOKEN, keep="memory") as publisher:
        publisher.publish(1)
        told = config(tmp_path, "rsync", address=publisher.address, token="another")
        with pytest.raises(PeerRefused, match="token"):
            DynamicWeightManager(told, Net(), 0)
