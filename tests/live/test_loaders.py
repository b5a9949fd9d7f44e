"""An engine's own loader as the target of updates: it gets whole tensors, verified, in its order."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from child_processes import LIMIT, until
from flyweight.adapters.loader import Loader
from flyweight.errors import DigestMismatch, LifecycleError, PlanError, TransportError
from flyweight.live import Publisher, Replica
from flyweight.spec.dtype import DTYPES
from flyweight.spec.manifest import TensorSpec
from live.live_processes import SHAPES, TOKEN, Part, at, once, shared, values

ADDRESS = "tcp://127.0.0.1:0"


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as found:
        yield found


def published(model, **options):
    return Publisher(model, ADDRESS, token=TOKEN, timeout_seconds=LIMIT, **options)


def taken(load, publisher, **options):
    return Replica(load, publisher.address, token=TOKEN, **{"framework": "numpy", **options})


def update(threads, publisher, replica, version, **options):
    """Return what is published and the update of it, once the replica waits."""
    future = threads.submit(replica.update, timeout_seconds=LIMIT, **options)
    until(lambda: publisher.waiting)
    return publisher.publish(version), future


class Kept:
    """A loader that keeps what it gets."""

    def __init__(self):
        self.tensors = {}

    def __call__(self, named):
        self.tensors = dict(named)

    def holds(self, version, shapes=SHAPES):
        found = {name: np.asarray(tensor) for name, tensor in self.tensors.items()}
        return list(found) == list(shapes) and all(
            found[name].shape == shape and np.array_equal(found[name], values(name, shape, version))
            for name, shape in shapes.items()
        )


def numbers(shape):
    """Return an array of a dtype that Paddle has too."""
    return np.zeros(shape, np.int32)


@pytest.mark.parametrize("transport", ["auto", "filled", "read"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_loader_gets_whole_tensors_in_order_which_it_may_keep(threads, transport, verify):
    trainer, kept = Part(SHAPES, shared), Kept()
    with (
        published(trainer.model, verify=verify) as publisher,
        taken(kept, publisher, transport=transport) as replica,
    ):
        for version in (1, 2):
            trainer.fill(version)
            report, future = update(threads, publisher, replica, version)
            found = future.result(LIMIT)
            assert found.verified == ("received" if verify else "nothing")
            assert found.transport == {"auto": "mapped"}.get(transport, transport)
            assert not report.failed
            trainer.fill(77)  # the loader's tensors are its own
            assert kept.holds(version)
            assert replica.version == version


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_loader_gets_tensors_of_its_framework(threads, framework):
    library = pytest.importorskip(framework)
    model, kept = {"a": numbers((7, 3)), "scale": numbers(()), "empty": numbers((0, 3))}, Kept()
    model["a"][...] = np.arange(21).reshape(7, 3)
    with published(model) as publisher, taken(kept, publisher, framework=framework) as replica:
        _, future = update(threads, publisher, replica, 1)
        future.result(LIMIT)
        assert all(isinstance(each, library.Tensor) for each in kept.tensors.values())
        assert {name: tuple(each.shape) for name, each in kept.tensors.items()} == {
            "a": (7, 3), "scale": (), "empty": (0, 3),
        }  # fmt: skip
        assert np.array_equal(np.asarray(kept.tensors["a"]), model["a"])


NBYTES = 4 * sum(math.prod(shape) for shape in SHAPES.values())


def test_a_tensor_that_is_not_what_was_published_is_found_before_the_engine_pauses(threads):
    trainer, kept, paused = Part(SHAPES, shared), Kept(), []
    with (
        published(trainer.model) as publisher,
        taken(kept, publisher, transport="mapped") as replica,
    ):
        for version in (1, 2, 3):
            trainer.fill(version)
            spoil = trainer.arrays["scale"].fill if version == 2 else lambda _: None
            with at("leased", once(lambda spoil=spoil: spoil(77))):
                _, future = update(threads, publisher, replica, version, before=paused.append)
                if version == 2:
                    with pytest.raises(DigestMismatch, match="'scale'"):
                        future.result(LIMIT)
                else:
                    future.result(LIMIT)
            held = 1 if version == 2 else version
            assert (replica.state, replica.version) == ("READY", held)
            assert kept.holds(held)
        assert paused == [1, 3]


def test_a_trainer_that_dies_while_the_engine_pauses_costs_a_loader_nothing(threads):
    trainer, kept = Part(SHAPES, shared), Kept()
    with (
        published(trainer.model, verify=False) as publisher,
        taken(kept, publisher, transport="mapped") as replica,
    ):

        def die(version):
            publisher.close()
            trainer.fill(77)

        trainer.fill(1)
        _, future = update(threads, publisher, replica, 1, before=die)
        assert future.result(LIMIT).version == 1
        assert kept.holds(1)


@pytest.mark.parametrize(
    ("transport", "staging_bytes"), [("mapped", 0), ("filled", NBYTES), ("read", NBYTES)]
)
def test_what_fits_into_no_memory_before_the_pause_is_made_in_it(threads, transport, staging_bytes):
    trainer, kept = Part(SHAPES, shared), Kept()
    options = {"transport": transport, "staging_bytes": staging_bytes}
    with published(trainer.model) as publisher, taken(kept, publisher, **options) as replica:
        for version in (1, 2):
            trainer.fill(version)
            _, future = update(threads, publisher, replica, version)
            assert future.result(LIMIT).transport == transport
            assert kept.holds(version)


@pytest.mark.parametrize(("transport", "staging_bytes"), [("mapped", 0), ("read", NBYTES)])
def test_a_loader_gets_no_tensor_that_is_not_what_was_published(threads, transport, staging_bytes):
    trainer, got = Part(SHAPES, shared), []

    def load(named):
        try:
            got.extend(name for name, _ in named)
        except DigestMismatch as error:
            raise RuntimeError("could not load") from error

    with (
        published(trainer.model) as publisher,
        taken(load, publisher, transport=transport, staging_bytes=staging_bytes) as replica,
    ):

        def spoil():
            if transport == "mapped":
                trainer.arrays["scale"][...] += 1
            else:
                replica._incoming.staging.memory[0].segment.bytes[-1] ^= 1

        trainer.fill(1)
        with at("copy", once(spoil)):
            report, future = update(threads, publisher, replica, 1)
            with pytest.raises(DigestMismatch, match="'scale'"):
                future.result(LIMIT)
        assert "scale" not in got
        if transport == "mapped":  # else the replica needs the trainer no more
            assert "DigestMismatch" in report.replicas[0].error
        assert (replica.state, replica.version) == ("FAILED", None)
        _, future = update(threads, publisher, replica, 2)
        assert future.result(LIMIT).version == 2
        assert "scale" in got


@pytest.mark.parametrize("verify", [True, False])
def test_without_digests_a_lease_that_ends_while_a_loader_runs_fails_the_update(threads, verify):
    started, go_on, trainer = threading.Event(), threading.Event(), Part(SHAPES, shared)

    def load(named):
        next(named)
        started.set()
        assert go_on.wait(LIMIT)
        list(named)

    with (
        published(trainer.model, verify=verify) as publisher,
        taken(load, publisher, transport="mapped", staging_bytes=0) as replica,
    ):
        future = threads.submit(replica.update, timeout_seconds=LIMIT)
        until(lambda: publisher.waiting)
        publishing = threads.submit(publisher.publish, 1)
        assert started.wait(LIMIT)
        publisher.close()
        assert publishing.exception(LIMIT) or publishing.result().pending
        go_on.set()
        if verify:  # what the loader got was compared before
            assert future.result(LIMIT).verified == "received"
        else:
            assert isinstance(future.exception(LIMIT), TransportError)
            assert replica.state == "FAILED"


def raising(named):
    next(named)
    raise ValueError("no such parameter")


def test_a_loader_that_fails_or_leaves_tensors_fails_the_replica_by_name(threads):
    cases = [
        (raising, LifecycleError, "no such parameter"),
        (
            next,
            TransportError,
            "took 1 of 4 tensors; it left 'layer.bias', 'layer.weight', 'scale'",
        ),
    ]
    trainer = Part(SHAPES, shared)  # mapped in the pause, so that the report waits for the loader
    with published(trainer.model) as publisher:
        for version, (load, kind, text) in enumerate(cases):
            with taken(load, publisher, staging_bytes=0) as replica:
                report, future = update(threads, publisher, replica, version)
                with pytest.raises(kind, match=text):
                    future.result(LIMIT)
                assert text in report.replicas[0].error
                assert replica.state == "FAILED"


def test_an_iterator_that_a_loader_keeps_is_over(threads):
    iterators = []

    def load(named):
        iterators.append(named)
        for _ in named:
            if len(iterators) == 1:
                raise ValueError("no")

    with published(Part(SHAPES).model) as publisher, taken(load, publisher) as replica:
        _, future = update(threads, publisher, replica, 1)
        with pytest.raises(LifecycleError):
            future.result(LIMIT)
        assert list(iterators[0]) == []
        _, future = update(threads, publisher, replica, 2)
        assert future.result(LIMIT).version == 2


@pytest.mark.parametrize("transport", ["auto", "read"])
def test_a_loader_gets_tensors_whole_that_ranks_of_the_trainer_hold_in_parts(
    threads, transport, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLYWEIGHT_RUN_DIR", str(tmp_path))
    parts, kept = [Part(SHAPES, shared, rank, 2) for rank in (0, 1)], Kept()
    address = f"unix:{tmp_path}/trainer"
    options = {"timeout_seconds": LIMIT, "world_size": 2, "token": TOKEN}

    def publisher(rank):
        return Publisher(parts[rank].model, address, rank=rank, **options)

    other = threads.submit(publisher, 1)
    with publisher(0) as front, other.result(LIMIT) as second:
        choice = "filled" if transport == "read" else "auto"
        with taken(kept, front, transport=choice) as replica:
            for version in (1, 2):
                for each in parts:
                    each.fill(version)
                future = threads.submit(replica.update, timeout_seconds=LIMIT)
                until(lambda: front.waiting)
                theirs = threads.submit(second.publish, version)
                front.publish(version)
                theirs.result(LIMIT)
                assert future.result(LIMIT).verified == "received"
                assert kept.holds(version)


@pytest.mark.parametrize("transport", ["auto", "read"])
def test_a_loader_gets_thousands_of_small_tensors(threads, transport):
    model = {f"layer.{n}.weight": shared((8, 4)) for n in range(5000)}
    model["large"] = shared((5000, 5000))  # a batch of its own
    for n, array in enumerate(model.values()):
        array[...] = n
    kept = Kept()
    with published(model) as publisher, taken(kept, publisher, transport=transport) as replica:
        _, future = update(threads, publisher, replica, 1)
        assert future.result(LIMIT).nbytes == sum(each.nbytes for each in model.values())
        assert list(kept.tensors) == list(model)
        assert all(np.array_equal(kept.tensors[name], model[name]) for name in model)


class Chosen(Loader):
    """A loader that takes the tensors of an engine, in an order and dtypes of its own."""

    def __init__(self, load, dtypes):
        super().__init__(load, "torch", "cpu")
        self._dtypes = dtypes

    def choose(self, tensors):
        return {
            name: TensorSpec(DTYPES[dtype], tensors[name].shape)
            for name, dtype in self._dtypes.items()
        }


def test_a_loader_may_choose_tensors_and_their_order_and_have_them_cast(threads):
    torch = pytest.importorskip("torch")
    model = {name: torch.randn(33, 5) for name in "abcd"}
    dtypes, kept = {"d": "bf16", "a": "f32", "c": "bf16"}, Kept()
    with published(model) as publisher:
        with taken(Chosen(kept, dtypes), publisher, cast=True) as replica:
            _, future = update(threads, publisher, replica, 1)
            future.result(LIMIT)
            assert list(kept.tensors) == ["d", "a", "c"]
            for name, tensor in kept.tensors.items():
                assert torch.equal(tensor, model[name].to(tensor.dtype))
            assert kept.tensors["d"].dtype == torch.bfloat16
        with pytest.raises(PlanError, match="'c'"):
            taken(Chosen(kept, dtypes), publisher)
