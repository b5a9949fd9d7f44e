"""Live updates on one GPU: trainer and replica are two processes, and no byte leaves the device."""

import gc
import signal
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

from device_memory import used_bytes  # noqa: E402

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child, until  # noqa: E402
from flyweight.errors import DigestMismatch, FlyweightError, TransportError  # noqa: E402
from live.live_processes import at  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
TOKEN = "a token that nobody guesses"
ANY = "tcp://127.0.0.1:0"


def model(seed, device="cuda", *, is_all_there=True):
    """Return tensors of every kind; one of them on the host, so that not all can be mapped."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    found = {
        "embed": normal(1000, 257).bfloat16(),
        "large": normal(3 << 20),
        "transposed": normal(300, 400).t(),
        "strided": normal(64, 64)[::2, 1::3],
        "odd": normal(7, 9).to(torch.float8_e4m3fn),
        "scalar": normal(),
        "empty": torch.empty(0, 4, device=device),
        "flag": torch.tensor([True, False, True], device=device),
    }
    if not is_all_there:
        found["host"] = torch.randn(1000, generator=generator)
    return found


def fill(tensors, seed):
    for name, tensor in model(seed, is_all_there="host" not in tensors).items():
        tensors[name].copy_(tensor)


def raw(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def holds(tensors, seed):
    wanted = model(seed, is_all_there="host" not in tensors)
    return [name for name in wanted if raw(tensors[name]) != raw(wanted[name])] == []


def engine(address, device, options, pipe):
    """Obey commands until the end: update, report memory, check what the tensors hold."""
    options = dict(options)
    target = model(99, device, is_all_there=not options.pop("has_host", False))
    if cut := options.pop("is_cut", False):
        target = {"w": fw.Sharded(torch.zeros(64, 32, device=device), (64, 64), (0, 32))}
    if options.pop("is_wider", False):
        target = {
            name: each.float() if each.dtype == torch.bfloat16 else each
            for name, each in target.items()
        }
    with fw.Replica(target, address, token=TOKEN, name="engine", **options) as replica:
        while (command := pipe.recv()) != "end":
            if command == "update":
                try:
                    report = replica.update(timeout_seconds=LIMIT)
                    pipe.send((report, str(replica.state)))
                except FlyweightError as error:
                    pipe.send((error, str(replica.state)))
            elif command == "memory":
                torch.cuda.synchronize()
                pipe.send(used_bytes())
            elif command == "tensors":
                leaves = {"w": target["w"].tensor} if cut else target
                pipe.send({name: raw(each) for name, each in leaves.items()})
            else:
                pipe.send(holds(target, command))


class Engine(Child):
    """An engine's process; without an error it must end well."""

    def __init__(self, address, device="cuda", **options):
        super().__init__(engine, address, device, options, context=SPAWN)

    def ask(self, command):
        self.send(command)
        return self.told(2 * LIMIT)

    def __exit__(self, *raised):
        if self.process.exitcode is None and raised[0] is None:
            assert self.ask("end") == ("result", None)
        super().__exit__(*raised)


def publishing(tensors, **options):
    return fw.Publisher(tensors, ANY, token=TOKEN, timeout_seconds=LIMIT, **options)


def publish(publisher, engine, version, **options):
    engine.send("update")
    until(lambda: publisher.waiting, 2 * LIMIT)
    report = publisher.publish(version, num_replicas=1, timeout_seconds=LIMIT, **options)
    told, state = engine.told()
    assert not isinstance(told, Exception), told
    assert not report.failed, report
    assert state == "READY"
    return report, told


@pytest.mark.parametrize(
    ("options", "transport", "way"),
    [
        ({}, "auto", "mapped"),
        ({"keep": "in_place"}, "mapped", "mapped"),
        ({"keep": "memory"}, "auto", "mapped"),
        ({}, "filled", "filled"),
        ({}, "read", "read"),
    ],
    ids=str,
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_replica_on_the_same_gpu_takes_versions_in_place(options, transport, way, verify):
    trainer = model(1)
    with (
        publishing(trainer, verify=verify, **options) as publisher,
        Engine(publisher.address, transport=transport) as engine,
    ):
        for version in (1, 2, 3):
            publisher.withdraw()
            fill(trainer, version)
            report, update = publish(publisher, engine, version)
            assert engine.ask(version) is True
            assert update.verified == ("live" if verify else "nothing")
            assert update.transport == report.replicas[0].transport == way


@pytest.mark.parametrize("transport", ["filled", "read"])
def test_a_model_of_which_a_part_is_on_the_host_arrives(transport):
    trainer = model(1, is_all_there=False)
    with (
        publishing(trainer) as publisher,
        Engine(publisher.address, transport=transport, has_host=True) as engine,
    ):
        for version in (1, 2):
            fill(trainer, version)
            publish(publisher, engine, version)
            assert engine.ask(version) is True


@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("transport", ["auto", "filled", "read"])
@pytest.mark.parametrize("keep", [None, "memory"])
def test_trainer_and_replica_may_be_on_different_kinds_of_memory(here, there, transport, keep):
    trainer = model(1, here)
    with (
        publishing(trainer, keep=keep) as publisher,
        Engine(publisher.address, there, transport=transport) as engine,
    ):
        for version in (1, 2):
            fill(trainer, version)
            _, update = publish(publisher, engine, version)
            assert update.verified == "live"
            assert engine.ask(version) is True


@pytest.mark.parametrize("transport", ["auto", "filled", "read"])
def test_a_cast_on_the_way_has_the_bits_of_torch(transport):
    trainer = {**model(1), "embed": model(1)["embed"]}
    with (
        publishing(trainer) as publisher,
        Engine(publisher.address, transport=transport, is_wider=True, cast=True) as engine,
    ):
        publish(publisher, engine, 1)
        found = engine.ask("tensors")
    assert found["embed"] == raw(trainer["embed"].float())
    assert found["large"] == raw(trainer["large"])


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_a_cut_of_columns_arrives(transport):
    whole = torch.randn(64, 64, device="cuda")
    with (
        publishing({"w": whole}) as publisher,
        Engine(publisher.address, transport=transport, is_cut=True) as engine,
    ):
        publish(publisher, engine, 1)
        assert engine.ask("tensors")["w"] == raw(whole[:, 32:])


@pytest.mark.parametrize("transport", ["mapped", "filled"])
def test_tensors_that_move_are_published_from_where_they_are(transport):
    trainer = model(1)
    with (
        publishing(trainer) as publisher,
        Engine(publisher.address, transport=transport) as engine,
    ):
        publish(publisher, engine, 1)
        for version in (2, 3):
            trainer.update(model(version))
            torch.cuda.empty_cache()
            publish(publisher, engine, version)
            assert engine.ask(version) is True


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_a_step_under_way_when_publishing_is_waited_for(transport):
    trainer = model(1)
    with (
        publishing(trainer) as publisher,
        Engine(publisher.address, transport=transport) as engine,
    ):
        publish(publisher, engine, 1)
        side = torch.cuda.Stream()
        for version in (2, 3):
            new = model(version)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(200_000_000)
                for name, tensor in trainer.items():
                    tensor.copy_(new[name], non_blocking=True)
            publish(publisher, engine, version)
            assert engine.ask(version) is True


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_updates_leave_no_device_memory_behind_on_either_side(transport):
    trainer = model(1)
    with (
        publishing(trainer) as publisher,
        Engine(publisher.address, transport=transport) as engine,
    ):
        for version in range(1, 4):
            publish(publisher, engine, version)
        before = used_bytes(), engine.ask("memory")
        for version in range(4, 54):
            publish(publisher, engine, version)
        torch.cuda.synchronize()
        assert (used_bytes(), engine.ask("memory")) == before


def test_a_killed_replica_is_noticed_and_the_next_one_served():
    trainer = model(1)
    with publishing(trainer) as publisher:
        with Engine(publisher.address) as engine:
            publish(publisher, engine, 1)
            engine.send("update")
            until(lambda: publisher.waiting)
            engine.kill()
            engine.join()
            assert not publisher.publish(2, timeout_seconds=600).pending  # it would hang
        with Engine(publisher.address) as engine:
            fill(trainer, 3)
            publish(publisher, engine, 3)
            assert engine.ask(3) is True


def trainer_process(keep, pipe):
    tensors = model(1)
    publisher = fw.Publisher(tensors, ANY, token=TOKEN, keep=keep)
    pipe.send(publisher.address)
    publisher.publish(1, num_replicas=1, timeout_seconds=2 * LIMIT)
    pipe.send("published")
    signal.pause()


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
def test_a_killed_trainer_leaves_the_replica_whole(transport):
    """Its memory was mapped here; what it had may be freed now."""
    target = model(50)
    with Child(trainer_process, "in_place", context=SPAWN) as trainer:
        address = trainer.told(2 * LIMIT)
        with fw.Replica(target, address, token=TOKEN, transport=transport) as replica:
            replica.update(timeout_seconds=LIMIT)
            assert trainer.told() == "published"
            trainer.kill()
            trainer.join()
            with pytest.raises(FlyweightError):
                replica.update(timeout_seconds=0.5)
            assert (replica.version, str(replica.state)) == (1, "READY")
            assert holds(target, 1)
            assert torch.ones(8, device="cuda").sum().item() == 8  # the context is whole


@pytest.mark.parametrize("transport", ["mapped", "filled", "read"])
@pytest.mark.parametrize("point", ["before", "copy"])
def test_a_trainer_that_is_killed_in_the_pause_leaves_a_whole_version_or_none(transport, point):
    """What is read is here by then; what the trainer's device has to give is not."""
    target = model(50)
    with Child(trainer_process, "in_place", context=SPAWN) as trainer, ExitStack() as stack:

        def kill(*_):
            trainer.kill()
            trainer.join()

        address = trainer.told(2 * LIMIT)
        replica = stack.enter_context(fw.Replica(target, address, token=TOKEN, transport=transport))
        if point == "copy":
            stack.enter_context(at("copy", kill))
        try:
            report = replica.update(
                timeout_seconds=2 * LIMIT, before=kill if point == "before" else None
            )
            assert report.version == 1
            assert holds(target, 1)
        except FlyweightError:
            assert transport != "read"
            assert replica.version is None
            assert str(replica.state) == ("EMPTY" if point == "before" else "FAILED")
        assert torch.ones(8, device="cuda").sum().item() == 8


# Trainers with allocators of all kinds, each in a process of its own.

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
POOLED = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
PRIVATE = {**EXPANDABLE, "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"}


def trainer_of_a_kind(address, num_versions, pipe):
    """Publish; send how each version went, return the allocator."""
    import torch

    tensors = model(1)
    with fw.Publisher(tensors, address, token=TOKEN, timeout_seconds=2 * LIMIT) as publisher:
        for version in range(1, num_versions + 1):
            fill(tensors, version)
            report = publisher.publish(version, num_replicas=1, timeout_seconds=2 * LIMIT)
            pipe.send((report.replicas[0].transport, [each.error for each in report.failed]))
    return torch.cuda.get_allocator_backend()


@pytest.fixture
def start_trainer(address, monkeypatch):
    """Start a trainer of a kind, with its allocator set by the environment."""
    with ExitStack() as stack:

        def start(environ, num_versions=2):
            for name, value in environ.items():
                monkeypatch.setenv(name, value)
            return stack.enter_context(
                Child(trainer_of_a_kind, address, num_versions, context=SPAWN)
            )

        yield start


@pytest.mark.parametrize(
    ("environ", "way", "backend"),
    [
        (EXPANDABLE, "mapped", "native"),
        (POOLED, "filled", "cudaMallocAsync"),
        (PRIVATE, "filled", "native"),
    ],
    ids=["expandable", "pooled", "private"],
)
def test_memory_of_every_allocator_arrives_and_is_mapped_where_that_can_be(
    address, start_trainer, environ, way, backend
):
    trainer = start_trainer(environ)
    target = model(50)
    with fw.Replica(target, address, token=TOKEN, name="engine") as replica:
        for version in (1, 2):
            report = replica.update(version, timeout_seconds=2 * LIMIT)
            assert (report.version, report.verified, report.transport) == (version, "live", way)
            assert trainer.told() == (way, [])
            assert holds(target, version)
    assert trainer.result() == backend


@pytest.mark.parametrize("environ", [POOLED, PRIVATE], ids=["pooled", "private"])
def test_memory_that_cannot_be_mapped_is_refused_where_that_is_asked_for(
    address, start_trainer, environ
):
    start_trainer(environ, num_versions=1)
    target = model(50)
    with fw.Replica(target, address, token=TOKEN, transport="mapped", name="engine") as replica:
        with pytest.raises(TransportError, match="cannot be mapped here"):
            replica.update(timeout_seconds=2 * LIMIT)
        assert str(replica.state) == "EMPTY"


def test_an_engine_whose_memory_nobody_else_can_map_is_written_all_the_same(monkeypatch):
    trainer = model(1)  # by the allocator of this process, which is chosen by now
    for name, value in POOLED.items():
        monkeypatch.setenv(name, value)
    with publishing(trainer) as publisher, Engine(publisher.address) as engine:
        for version in (1, 2):
            fill(trainer, version)
            _, update = publish(publisher, engine, version)
            assert engine.ask(version) is True
            assert (update.transport, update.verified) == ("mapped", "live")


@pytest.mark.parametrize("keep", [None, "memory"])
@pytest.mark.parametrize("transport", ["auto", "filled"])
def test_a_background_publish_lets_the_trainer_step_once_copied(keep, transport):
    trainer = model(1)
    with (
        publishing(trainer, keep=keep) as publisher,
        Engine(publisher.address, transport=transport) as engine,
    ):
        fill(trainer, 1)
        publish(publisher, engine, 1)
        engine.send("update")
        until(lambda: publisher.waiting)
        fill(trainer, 2)
        publication = publisher.publish(2, background=True)
        publication.wait_copied(LIMIT)
        fill(trainer, 7)
        told, state = engine.told()
        assert (told.version, state) == (2, "READY")
        assert not publication.wait(LIMIT).failed
        assert engine.ask(2) is True


def differing_trainer(address, pipe):
    source = {"a": torch.ones(1 << 20, device="cuda"), "b": torch.ones(1 << 20, device="cuda")}
    source["b"][12345] = 2
    with fw.Publisher(source, address, token=TOKEN) as publisher:
        publisher.publish(1, num_replicas=1, timeout_seconds=LIMIT)


@pytest.mark.parametrize("transport", ["mapped", "filled"])
def test_the_digest_sees_what_a_copy_did_wrong(address, transport):
    """One tensor here, two that differ there: the live bytes cannot be both."""
    one = torch.zeros(1 << 20, device="cuda")
    target = {"a": one, "b": one}
    with (
        Child(differing_trainer, address, context=SPAWN),
        fw.Replica(target, address, token=TOKEN, transport=transport, name="engine") as replica,
    ):
        with pytest.raises(DigestMismatch):
            replica.update(timeout_seconds=2 * LIMIT)
        assert str(replica.state) == "FAILED"


def test_a_replica_that_is_gone_keeps_no_memory_of_the_trainer():
    """Twenty engines come and go, each with all of the model mapped."""
    trainer = model(1)
    with publishing(trainer, keep="in_place") as publisher:
        publisher.publish(1)
        with ExitStack() as stack:
            target = model(50)
            for number in range(20):
                name = f"engine {number}"
                replica = stack.enter_context(
                    fw.Replica(target, publisher.address, token=TOKEN, name=name)
                )
                replica.update(1, timeout_seconds=LIMIT)
                assert holds(target, 1)
                replica.close()
                if number == 2:
                    gc.collect()
                    torch.cuda.synchronize()
                    before = used_bytes()
        gc.collect()
        torch.cuda.synchronize()
        assert used_bytes() <= before
