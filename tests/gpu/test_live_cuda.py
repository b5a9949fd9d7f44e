"""Live updates on one GPU: trainer and replica are two processes, the weights never leave it."""

import signal
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child, until  # noqa: E402
from flyweight.adapters.loader import Loader  # noqa: E402
from flyweight.errors import DigestMismatch, PeerLost, PlanError, TransferTimeout  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]


def model(seed, device="cuda"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    return {
        "embed": normal(1000, 257).bfloat16(),
        "large": normal(3 << 20),
        "transposed": normal(300, 400).t(),
        "strided": normal(64, 64)[::2, 1::3],
        "odd": normal(7, 9).to(torch.float8_e4m3fn),
        "scalar": normal(),
        "empty": torch.empty(0, 4, device=device),
        "flag": torch.tensor([True, False, True], device=device),
        "host": torch.randn(1000, generator=generator),
    }


def fill(tensors, seed):
    for name, tensor in model(seed).items():
        tensors[name].copy_(tensor)


def raw(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def holds(tensors, seed):
    wanted = model(seed)
    return [name for name in wanted if raw(tensors[name]) != raw(wanted[name])] == []


def engine(address, device, kind, pipe):
    """Obey commands until the end: update, report memory, check what the tensors hold."""
    target = model(99, device)
    if kind == "columns":
        target = {"w": fw.Sharded(torch.zeros(64, 32, device=device), (64, 64), (0, 32))}
    kept = {}

    def load(named):
        kept.clear()
        kept.update(named)

    if kind == "loader":
        target = load
    elif isinstance(kind, int):  # how many bytes a loader stages
        target = Loader(load, "torch", device)
        target.staging_bytes = kind
    with fw.Replica(target, address, device=device) as replica:
        while (command := pipe.recv()) != "end":
            if command == "update":
                try:
                    report = replica.update(timeout_seconds=LIMIT)
                    pipe.send((report, replica.state))
                except fw.FlyweightError as error:
                    pipe.send((error, replica.state))
            elif command == "memory":
                torch.cuda.synchronize()
                pipe.send(used_bytes())
            elif command == "columns":
                pipe.send(raw(target["w"].tensor))
            else:
                pipe.send(holds(target if kind == "model" else kept, command))


class Engine(Child):
    """An engine's process; without an error it must end well."""

    def __init__(self, address, device="cuda", kind="model"):
        super().__init__(engine, address, device, kind, context=SPAWN)

    def ask(self, command):
        self.send(command)
        return self.told()

    def __exit__(self, *raised):
        if self.process.exitcode is None and raised[0] is None:
            assert self.ask("end") == ("result", None)
        super().__exit__(*raised)


def publish(publisher, engine, version, **options):
    engine.send("update")
    report = publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT, **options)
    told, state = engine.told()
    assert not isinstance(told, Exception), told
    assert report.failed == (), report.failed
    assert state == "ready"
    return report, told


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "host+mapped"),
        ({"transport": "bucketed"}, "bucketed+host"),
        ({"transport": "bucketed", "bucket_bytes": 1 << 20, "depth": 2}, "bucketed+host"),
        ({"transport": "host"}, "host"),
        ({"hold": True}, "mapped"),
    ],
    ids=str,
)
def test_a_replica_on_the_same_gpu_takes_versions_over_in_place(address, options, expected):
    trainer = model(1)
    with fw.Publisher(trainer, address, **options) as publisher, Engine(address) as engine:
        for version in (1, 2, 3):
            fill(trainer, version)
            report, update = publish(publisher, engine, version)
            assert engine.ask(version) is True
            assert update.verified == "live"
            assert report.replicas[0].strategy == expected


def test_a_replica_on_the_cpu_and_a_trainer_on_the_gpu(address):
    trainer = model(1)
    with fw.Publisher(trainer, address) as publisher, Engine(address, "cpu") as engine:
        publish(publisher, engine, 1)
        assert engine.ask(1) is True


def test_a_trainer_on_the_cpu_and_a_replica_on_the_gpu(address):
    trainer = model(1, "cpu")
    with fw.Publisher(trainer, address, hold=True) as publisher, Engine(address) as engine:
        publish(publisher, engine, 1)
        assert engine.ask(1) is True


@pytest.mark.parametrize("kind", ["loader", 0, 1 << 20, 1 << 30], ids=str)
@pytest.mark.parametrize("transport", ["auto", "bucketed"])
def test_a_loader_on_the_gpu_gets_whole_tensors_that_were_checked(address, transport, kind):
    trainer = model(1)
    with (
        fw.Publisher(trainer, address, transport=transport, bucket_bytes=1 << 20) as publisher,
        Engine(address, kind=kind) as engine,
    ):
        for version in (1, 2):
            fill(trainer, version)
            _, update = publish(publisher, engine, version)
            assert update.verified == "received"
            assert engine.ask(version) is True


@pytest.mark.parametrize("transport", ["auto", "bucketed"])
def test_a_cut_of_columns_arrives(address, transport):
    whole = torch.randn(64, 64, device="cuda")
    with (
        fw.Publisher({"w": whole}, address, transport=transport) as publisher,
        Engine(address, kind="columns") as engine,
    ):
        publish(publisher, engine, 1)
        assert engine.ask("columns") == raw(whole[:, 32:])


def test_tensors_that_move_are_mapped_anew(address):
    trainer = model(1)
    with fw.Publisher(trainer, address) as publisher, Engine(address) as engine:
        publish(publisher, engine, 1)
        for version in (2, 3):
            trainer.update(model(version))
            torch.cuda.empty_cache()
            publish(publisher, engine, version)
            assert engine.ask(version) is True


def test_a_step_under_way_when_publishing_is_waited_for(address):
    trainer = model(1)
    with fw.Publisher(trainer, address) as publisher, Engine(address) as engine:
        publish(publisher, engine, 1)
        side = torch.cuda.Stream()
        for version in (2, 3):
            new = model(version)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
                for name, tensor in trainer.items():
                    if tensor.is_cuda:
                        tensor.copy_(new[name], non_blocking=True)
            trainer["host"].copy_(new["host"])
            publish(publisher, engine, version)
            assert engine.ask(version) is True


def test_rounds_leave_no_device_memory_behind_on_either_side(address):
    trainer = model(1)
    for transport in ("auto", "bucketed"):
        with (
            fw.Publisher(trainer, address, transport=transport) as publisher,
            Engine(address) as engine,
        ):
            for version in range(1, 4):
                publish(publisher, engine, version)
            before = engine.ask("memory")
            for version in range(4, 54):
                publish(publisher, engine, version)
            assert engine.ask("memory") == before


def test_a_killed_replica_is_noticed_and_the_next_one_served(address):
    trainer = model(1)
    with fw.Publisher(trainer, address) as publisher:
        with Engine(address) as engine:
            publish(publisher, engine, 1)
            engine.send("update")
            until(lambda: publisher.waiting)
            engine.kill()
            engine.join()
            report = publisher.publish(2)
            assert all(isinstance(each.error, PeerLost) for each in report.replicas)
        with Engine(address) as engine:
            fill(trainer, 3)
            publish(publisher, engine, 3)
            assert engine.ask(3) is True


def trainer_process(address, pipe):
    tensors = model(1)
    publisher = fw.Publisher(tensors, address)
    publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
    pipe.send("published")
    signal.pause()


def test_a_killed_trainer_leaves_the_replica_whole(address):
    target = model(50)
    with (
        Child(trainer_process, address, context=SPAWN) as trainer,
        fw.Replica(target, address) as replica,
    ):
        replica.update(timeout_seconds=LIMIT)
        assert trainer.told() == "published"
        trainer.kill()
        trainer.join()
        with pytest.raises(TransferTimeout):
            replica.update(timeout_seconds=0.5)
        assert (replica.version, replica.state) == (1, "ready")
        assert holds(target, 1)


# Trainers with allocators of all kinds, each in a process of its own.

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POOLED = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
PRIVATE = {**EXPANDABLE, "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"}
REMEDIES = {"pooled": "backend:native", "private": "expandable_segments:False"}


def trainer_of_a_kind(address, transport, num_versions, pipe):
    """Publish; send how each version went, return the allocator and why memory was not mapped."""
    import torch

    from flyweight.events import listening

    unmapped = []

    def listener(event):
        if event.kind == "publish.unmapped":
            unmapped.append(event.fields["reason"])

    tensors = model(1)
    if transport == "mapped":
        del tensors["host"]  # it is nobody else's to map, whatever the allocator
    with listening(listener), fw.Publisher(tensors, address, transport=transport) as publisher:
        for version in range(1, num_versions + 1):
            for name, tensor in model(version).items():
                if name in tensors:
                    tensors[name].copy_(tensor)
            report = publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT)
            failed = [(type(each.error).__name__, str(each.error)) for each in report.failed]
            pipe.send((report.replicas[0].strategy, failed))
    return torch.cuda.get_allocator_backend(), unmapped


@pytest.fixture
def start_trainer(address, monkeypatch):
    """Start a trainer of a kind, with its allocator set by the environment."""
    with ExitStack() as stack:

        def start(environ, *, transport="auto", num_versions=2):
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            words = (address, transport, num_versions)
            return stack.enter_context(Child(trainer_of_a_kind, *words, context=SPAWN))

        yield start


def test_expandable_segments_are_mapped_too(address, start_trainer):
    trainer = start_trainer(EXPANDABLE)
    target = model(50)
    with fw.Replica(target, address) as replica:
        for version in (1, 2):
            assert replica.update(timeout_seconds=LIMIT).version == version
            assert trainer.told() == ("host+mapped", [])
            assert holds(target, version)
    assert trainer.result() == ("native", [])


def test_expandable_segments_are_mapped_where_that_is_insisted_on(address, start_trainer):
    trainer = start_trainer(EXPANDABLE, transport="mapped", num_versions=1)
    target = model(50)
    del target["host"]
    with fw.Replica(target, address) as replica:
        assert replica.update(timeout_seconds=LIMIT).strategy == "mapped"
    assert trainer.told() == ("mapped", [])


@pytest.mark.parametrize("kind", ["pooled", "private"])
def test_memory_that_nobody_else_can_map_goes_through_buckets_and_is_told_once(
    address, start_trainer, kind
):
    """The slots are plain memory of the publisher's own; what arrives is verified as ever."""
    trainer = start_trainer(POOLED if kind == "pooled" else PRIVATE)
    target = model(50)
    with fw.Replica(target, address) as replica:
        for version in (1, 2):
            report = replica.update(timeout_seconds=LIMIT)
            assert (report.version, report.verified) == (version, "live")
            assert trainer.told() == ("bucketed+host", [])
            assert holds(target, version)
    backend, unmapped = trainer.result()
    assert backend == ("cudaMallocAsync" if kind == "pooled" else "native")
    assert len(unmapped) == 1
    assert REMEDIES[kind] in unmapped[0]


@pytest.mark.parametrize("kind", ["pooled", "private"])
def test_memory_that_nobody_else_can_map_is_refused_where_that_is_insisted_on(
    address, start_trainer, kind
):
    trainer = start_trainer(
        POOLED if kind == "pooled" else PRIVATE, transport="mapped", num_versions=1
    )
    target = model(50)
    del target["host"]
    with fw.Replica(target, address) as replica:
        with pytest.raises(PlanError, match=REMEDIES[kind]):
            replica.update(timeout_seconds=LIMIT)
        assert replica.state == "empty"
    _, ((error, text),) = trainer.told()
    assert error == "PlanError"
    assert REMEDIES[kind] in text


def test_an_engine_whose_memory_nobody_else_can_map_is_written_all_the_same(address, monkeypatch):
    trainer = model(1)  # by the allocator of this process, which is chosen by now
    for name, value in POOLED.items():
        monkeypatch.setenv(name, value)
    with fw.Publisher(trainer, address) as publisher, Engine(address) as engine:
        for version in (1, 2):
            fill(trainer, version)
            report, update = publish(publisher, engine, version)
            assert engine.ask(version) is True
            assert (report.replicas[0].strategy, update.verified) == ("host+mapped", "live")


def test_a_background_publish_lets_the_trainer_step_once_copied(address):
    trainer = model(1)
    for transport in ("auto", "bucketed"):
        with (
            fw.Publisher(trainer, address, transport=transport) as publisher,
            Engine(address) as engine,
        ):
            fill(trainer, 1)
            publish(publisher, engine, 1)
            engine.send("update")
            until(lambda: publisher.waiting)
            lease = publisher.publish(2, background=True)
            lease.wait_copied(LIMIT)
            fill(trainer, 7)
            told, state = engine.told()
            assert (told.version, state) == (2, "ready")
            assert lease.wait(LIMIT).failed == ()
            assert engine.ask(1) is True


def test_the_digest_sees_what_a_copy_did_wrong(address):
    """One tensor here, two that differ there: the live bytes cannot be both."""
    one = torch.zeros(1 << 20, device="cuda")
    with (
        Child(differing_trainer, address, context=SPAWN),
        fw.Replica({"a": one, "b": one}, address) as replica,
    ):
        with pytest.raises(DigestMismatch):
            replica.update(timeout_seconds=LIMIT)
        assert replica.state == "failed"


def differing_trainer(address, pipe):
    source = {"a": torch.ones(1 << 20, device="cuda"), "b": torch.ones(1 << 20, device="cuda")}
    source["b"][12345] = 2
    with fw.Publisher(source, address) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)
