"""What lies in live memory is compared with a version by digests, also by rows written by hand."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from campaign import SEED, budget
from child_processes import LIMIT, until
from flyweight.adapters.loader import Loader
from flyweight.adapters.rows import Row, Rows
from flyweight.adapters.sharded import Sharded
from flyweight.errors import (
    DTypeMismatch,
    FlyweightError,
    PeerLost,
    PlanError,
    ShapeMismatch,
    SpecError,
    TransferTimeout,
    TransportError,
    VersionError,
)
from flyweight.live import Publisher, Replica
from flyweight.spec.box import Box
from live.live_processes import SHAPES, TOKEN, Part, at, once, plain, shared
from live.one_process import fill, holds, in_background, mappable, model, relaying, taken

ADDRESS = "tcp://127.0.0.1:0"
SOON = 0.5
WAYS = ["mapped", "filled", "read"]
WHOLE = {"q": (6, 8), "k": (4, 8), "gate": (10, 8), "up": (10, 8), "down": (8, 10), "scale": ()}


def whole(name):
    return Box.whole(WHOLE[name])


class Trainer:
    """Float32 tensors with other values in each version."""

    def __init__(self, way="filled"):
        self.model = {name: torch.zeros(shape) for name, shape in WHOLE.items()}
        if way == "mapped":
            self.model = {name: each.share_memory_() for name, each in self.model.items()}

    def fill(self, version):
        for n, each in enumerate(self.model.values()):
            seeded = torch.Generator().manual_seed(1000 * version + n)
            each.copy_(torch.randn(each.shape, generator=seeded))


class Fused:
    """An engine whose parameters are fused, sliced, transposed, and of another dtype."""

    def __init__(self, dtype=torch.float32):
        self.parameters = {
            "qk": torch.zeros(10, 8, dtype=dtype),
            "gate_up": torch.zeros(10, 8, dtype=dtype),  # one half of both, as of two ranks
            "down": torch.zeros(10, 8, dtype=dtype),  # transposed
            "packed": torch.zeros(7, dtype=dtype),
        }

    def rows(self, tensors):
        parameters = self.parameters
        yield Row("q", whole("q"), parameters["qk"][:6])
        yield Row("k", Box((0, 0), (4, 3)), parameters["qk"][6:, :3])
        yield Row("k", Box((0, 3), (4, 5)), parameters["qk"][6:, 3:])
        yield Row("gate", Box((5, 0), (5, 8)), parameters["gate_up"][::2])
        yield Row("up", Box((5, 0), (5, 8)), parameters["gate_up"][1::2])
        yield Row("down", whole("down"), parameters["down"].T)
        yield Row("scale", whole("scale"), parameters["packed"][3])

    def take(self, named):
        """Load whole tensors, as an engine's own loader does."""
        tensors = dict(named)
        for name, box, view in self.rows(None):
            view.copy_(tensors[name][box.slices])

    def holds(self, trainer):
        return all(
            torch.equal(view, trainer.model[name][box.slices].to(view.dtype))
            for name, box, view in self.rows(None)
        )

    @property
    def as_rows(self):
        return Rows(self.parameters, self.rows)


def published(model, **options):
    return Publisher(model, ADDRESS, token=TOKEN, **{"timeout_seconds": LIMIT, **options})


def replica_of(target, publisher, way="auto", **options):
    transport = "auto" if way == "mapped" else way
    return Replica(
        target, publisher.address, token=TOKEN, name="engine", transport=transport, **options
    )


def loading(engine):
    return Loader(engine.take, "torch", "cpu", rows=engine.as_rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_in_place_and_compared_where_they_lie(way, dtype):
    trainer, engine = Trainer(way), Fused(dtype)
    with (
        published(trainer.model, keep="in_place") as publisher,
        replica_of(engine.as_rows, publisher, way, cast=True) as replica,
    ):
        for version in (1, 2):
            publisher.withdraw()
            trainer.fill(version)
            _, (report,) = taken(publisher, version, replica)
            assert (report.transport, report.verified) == (way, "live")
            assert engine.holds(trainer)
            assert (engine.parameters["packed"] != 0).sum() == 1
            found = replica.check_live(timeout_seconds=LIMIT)
            assert (found.version, found.session) == (version, replica.session)
            assert (found.equal, found.different) == (("q", "k", "gate", "up", "down", "scale"), ())
            num_items = sum(each.box.num_elements for each in found.rows)
            assert found.nbytes == report.nbytes == num_items * dtype.itemsize


@pytest.mark.parametrize("at_row", range(7))
def test_one_wrong_element_is_noticed_and_its_row_named(at_row):
    trainer, engine = Trainer(), Fused(torch.bfloat16)
    trainer.fill(1)
    with (
        published(trainer.model, keep="in_place") as publisher,
        replica_of(engine.as_rows, publisher, cast=True) as replica,
    ):
        taken(publisher, 1, replica)
        name, box, view = list(engine.rows(None))[at_row]
        last = tuple(size - 1 for size in view.shape)
        view[last] = -view[last]
        kept = {key: each.clone() for key, each in engine.parameters.items()}
        before = replica.version, replica.state, replica.report
        found = replica.check_live(timeout_seconds=LIMIT)
        assert found.different == (name,)
        assert [(each.name, each.box) for each in found.rows if not each.is_equal] == [(name, box)]
        assert before == (replica.version, replica.state, replica.report)
        assert all(torch.equal(kept[key], each) for key, each in engine.parameters.items())


def test_a_model_is_compared_too_and_also_before_it_took_a_version():
    weights, arrays = mappable(1), model(1)
    with (
        published(weights, keep="in_place") as publisher,
        replica_of(arrays, publisher) as replica,
    ):
        publisher.publish(4)
        assert replica.check_live(timeout_seconds=LIMIT).equal == ("a", "b")
        assert (replica.version, replica.state) == (None, "EMPTY")
        arrays["b"][5] = 7
        assert replica.check_live(4, timeout_seconds=LIMIT).different == ("b",)
        replica.update(timeout_seconds=LIMIT)
        assert replica.check_live(timeout_seconds=LIMIT).different == ()


@contextmanager
def two_ranks(parts, tmp_path, **options):
    """Start the two ranks of a trainer; yield what publishes on both, and the address."""
    options = {"timeout_seconds": LIMIT, "world_size": 2, "token": TOKEN, **options}
    address = f"unix:{tmp_path}/trainer"
    with ThreadPoolExecutor(2) as threads:

        def on_both(work):
            return [each.result(LIMIT) for each in [threads.submit(work, rank) for rank in (0, 1)]]

        def start(rank):
            return Publisher(parts[rank].model, address, rank=rank, **options)

        ranks = on_both(start)
        try:
            yield lambda version: on_both(lambda rank: ranks[rank].publish(version)), ranks
        finally:
            for each in ranks:
                each.close()


def random_rows(random, shape, memory, used):
    """Cut a tensor into random boxes, and put each somewhere into flat memory, transposed."""
    boxes = [Box.whole(shape)]
    for _ in range(random.integers(4) if shape else 0):
        box = boxes.pop(random.integers(len(boxes)))
        dim = int(random.integers(len(shape)))
        size = int(random.integers(box.shape[dim] + 1))
        for start, length in ((0, size), (size, box.shape[dim] - size)):
            offset, sizes = list(box.offset), list(box.shape)
            offset[dim], sizes[dim] = offset[dim] + start, length
            boxes.append(Box(tuple(offset), tuple(sizes)))
    for box in boxes:
        order = random.permutation(len(shape))
        step = int(random.integers(1, 3))
        end = used + step * box.num_elements
        view = memory[used:end:step].reshape([box.shape[dim] for dim in order])
        yield box, view.transpose(np.argsort(order))
        used = end


@pytest.mark.parametrize("seed", range(SEED, SEED + budget(4, 200)))
def test_any_rows_of_a_trainer_of_two_ranks_arrive_and_are_compared(seed, tmp_path):
    random = np.random.default_rng(seed)
    parts = [Part(SHAPES, shared if seed % 2 else plain, rank, 2) for rank in (0, 1)]
    memory = np.zeros(60000, np.uint32)
    rows, used = [], 0
    for name, shape in SHAPES.items():
        size = 2 * int(np.prod(shape))
        rows += [Row(name, *each) for each in random_rows(random, shape, memory, used)]
        used += size
    random.shuffle(rows)
    wanted = Part(SHAPES)
    target = Rows({"memory": memory}, lambda tensors: rows)
    with (
        two_ranks(parts, tmp_path) as (publish, (front, _)),
        replica_of(target, front) as replica,
    ):
        for version in (1, 2):
            for each in (*parts, wanted):
                each.fill(version)
            with in_background(replica.update, version, timeout_seconds=LIMIT) as updated:
                until(lambda: front.waiting)
                publish(version)
                assert not isinstance(updated(), BaseException), updated()
            for name, box, view in rows:
                assert np.array_equal(view, wanted.arrays[name][box.slices])
            assert replica.check_live(version, timeout_seconds=LIMIT).different == ()
        name, box, view = max(rows, key=lambda row: row.box.num_elements * random.random())
        view[tuple(size - 1 for size in view.shape)] ^= 1
        found = [each for each in replica.check_live(2).rows if not each.is_equal]
        assert [(each.name, each.box) for each in found] == [(name, box)]


# A loader's rows: the second kind of one lease.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_loader_has_placed_is_compared_when_the_trainer_has_gone(way, dtype):
    trainer, engine = Trainer(way), Fused(dtype)
    with published(trainer.model) as publisher:
        replica = replica_of(loading(engine), publisher, way, cast=True)
        trainer.fill(1)
        _, (report,) = taken(publisher, 1, replica)
        assert (report.transport, report.verified) == (way, "received")
    with replica:
        assert engine.holds(trainer)
        found = replica.check_live(1, timeout_seconds=LIMIT)
        assert (found.version, found.session, found.different) == (1, replica.session, ())
        engine.parameters["qk"][9, 7] += 1
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ("k",)
        with pytest.raises(PeerLost):  # the newest is not known
            replica.check_live(timeout_seconds=SOON)


@pytest.mark.parametrize("way", ["mapped", "filled"])
def test_both_kinds_of_a_loader_come_with_one_lease(way):
    trainer, engine, leases = Trainer(way), Fused(), []
    with (
        published(trainer.model) as publisher,
        replica_of(loading(engine), publisher, way) as replica,
        at("leasing", leases.append),
    ):
        taken(publisher, 1, replica)
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()
        assert leases == [0]


def swapped(row, other):
    def fault(rows):
        (first,), (second,) = rows[row], rows[other]
        return {
            **rows,
            row: [first._replace(tensor=second.tensor)],
            other: [second._replace(tensor=first.tensor)],
        }

    return fault


def moved(rows):
    left, right = rows["k"]
    return {**rows, "k": [left, right._replace(box=Box((0, 2), (4, 5)))]}


def not_transposed(rows):
    (row,) = rows["down"]
    return {**rows, "down": [row._replace(tensor=row.tensor.T.reshape(8, 10))]}


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (swapped("gate", "up"), ("gate", "up")),
        (moved, ("k",)),
        (not_transposed, ("down",)),
    ],
)
def test_a_fault_in_the_rows_of_a_loader_is_noticed(fault, names):
    trainer, engine = Trainer(), Fused()

    def wrong(tensors):
        rows = {}
        for each in engine.rows(tensors):
            rows.setdefault(each.name, []).append(each)
        for each in fault(rows).values():
            yield from each

    loader = Loader(engine.take, "torch", "cpu", rows=Rows(engine.parameters, wrong))
    with published(trainer.model) as publisher, replica_of(loader, publisher) as replica:
        trainer.fill(1)
        taken(publisher, 1, replica)
        found = replica.check_live(1, timeout_seconds=LIMIT)
        assert sorted(found.different) == sorted(names)
        assert set(found.equal) == set(WHOLE) - set(names)


def test_rows_may_come_from_a_rank_that_gives_the_loader_nothing(tmp_path):
    parts, memory = [Part({"w": (8, 4)}) for _ in range(2)], np.zeros((8, 4), np.uint32)

    def load(named):
        memory[...] = dict(named)["w"]

    def halves(tensors):
        return [Row("w", Box((at, 0), (4, 4)), memory[at : at + 4]) for at in (0, 4)]

    loader = Loader(load, "numpy", "cpu", rows=Rows({"w": memory}, halves))
    with (
        two_ranks(parts, tmp_path) as (publish, (front, _)),
        replica_of(loader, front) as replica,
    ):
        for each in parts:
            each.fill(1)
        with in_background(replica.update, timeout_seconds=LIMIT) as updated:
            until(lambda: front.waiting)
            publish(1)
            assert updated().nbytes == memory.nbytes
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()
        memory[5, 0] += 1
        found = replica.check_live(1, timeout_seconds=LIMIT)
        assert [each.is_equal for each in found.rows] == [True, False]


def test_each_rank_of_an_engine_compares_its_own_part_alone():
    weights, parts = model(1), [np.zeros((32, 32), np.float32) for _ in range(2)]
    cut = [{"a": Sharded(each, (64, 32), (32 * n, 0))} for n, each in enumerate(parts)]
    with published(weights, keep="in_place") as publisher, ThreadPoolExecutor(2) as threads:
        options = {"world_size": 2, "strict": False}
        replicas = [replica_of(cut[n], publisher, rank=n, **options) for n in range(2)]
        publisher.publish(1)
        assert replicas[1].check_live(timeout_seconds=LIMIT).different == ("a",)
        updates = [threads.submit(each.update, timeout_seconds=LIMIT) for each in replicas]
        assert {each.result(LIMIT).version for each in updates} == {1}
        parts[1][31, 31] = 0
        assert replicas[0].check_live(timeout_seconds=LIMIT).different == ()
        (row,) = replicas[1].check_live(timeout_seconds=LIMIT).rows
        assert (row.box, row.is_equal) == (Box((32, 0), (32, 32)), False)
        for each in replicas:
            each.close()


def test_rows_are_found_again_where_the_loader_puts_them():
    trainer, engine = Trainer(), Fused()
    with published(trainer.model) as publisher, replica_of(loading(engine), publisher) as replica:
        trainer.fill(1)
        taken(publisher, 1, replica)
        engine.parameters["qk"] = engine.parameters["qk"] + 1
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ("q", "k")
        trainer.fill(2)
        taken(publisher, 2, replica)
        assert engine.holds(trainer)
        assert replica.check_live(2, timeout_seconds=LIMIT).different == ()


def test_rows_that_moved_hold_no_version_and_are_written_where_they_are_then():
    trainer, engine = Trainer(), Fused()
    trainer.fill(1)
    with (
        published(trainer.model, keep="in_place") as publisher,
        replica_of(engine.as_rows, publisher) as replica,
    ):
        taken(publisher, 1, replica)
        engine.parameters["down"] = torch.zeros(10, 8)
        assert replica.version is None
        assert replica.check_live(timeout_seconds=LIMIT).different == ("down",)
        assert replica.version is None
        replica.update(timeout_seconds=LIMIT)
        assert engine.holds(trainer)
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()


@pytest.mark.parametrize("is_relay", [True, False])
def test_a_loader_that_takes_a_version_from_others_compares_what_it_can(is_relay, tmp_path):
    trainer, engines = Trainer(), (Fused(), Fused())
    publisher = published(trainer.model)
    with relaying(publisher.address, f"unix:{tmp_path}/relay") as relay:
        first = replica_of(loading(engines[0]), publisher, "read")
        trainer.fill(1)
        with first:
            _, _ = taken(publisher, 1, first, num_replicas=2)
            publisher.close()
            others = [relay.address] if is_relay else [first.serves_at]
            late = Replica(
                loading(engines[1]), publisher.address, token=TOKEN, name="late", fallback=others
            )
            with late:
                late.update(1, timeout_seconds=LIMIT)
                assert engines[1].holds(trainer)
                if is_relay:
                    assert late.check_live(1, timeout_seconds=LIMIT).different == ()
                else:  # which serves only what it takes itself
                    with pytest.raises(PlanError):
                        late.check_live(1, timeout_seconds=LIMIT)


# Versions that come and go meanwhile.


def test_new_weights_of_the_trainer_differ_until_they_are_taken():
    trainer, engine = Trainer(), Fused()
    with (
        published(trainer.model, keep="in_place") as publisher,
        replica_of(engine.as_rows, publisher) as replica,
    ):
        trainer.fill(1)
        taken(publisher, 1, replica)
        publisher.withdraw()
        trainer.fill(2)
        trainer.model["scale"][...] = engine.parameters["packed"][3]
        publisher.publish(2)
        until(lambda: replica.newest == 2)
        found = replica.check_live(timeout_seconds=LIMIT)
        assert (found.version, found.equal) == (2, ("scale",))
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()
        assert replica.version == 1
        replica.update(timeout_seconds=LIMIT)
        assert replica.check_live(timeout_seconds=LIMIT).different == ()


def test_a_version_that_is_withdrawn_before_its_lease_is_not_compared():
    weights, arrays = model(1), model(1)
    with (
        published(weights, keep="in_place") as publisher,
        replica_of(arrays, publisher) as replica,
    ):
        publisher.publish(1)

        def publish_another():
            publisher.withdraw()
            fill(weights, 2)
            publisher.publish(2)

        with at("leasing", once(publish_another)), pytest.raises(VersionError, match="offered"):
            replica.check_live(timeout_seconds=LIMIT)
        until(lambda: replica.newest == 2)
        found = replica.check_live(timeout_seconds=LIMIT)
        assert (found.version, found.different) == (2, ("a", "b"))
        assert replica.update(timeout_seconds=LIMIT).version == 2
        assert holds(arrays, 2)


def test_a_trainer_waits_for_a_check_that_has_its_lease():
    weights, arrays, is_withdrawn = model(1), model(1), threading.Event()
    published_2 = []
    with (
        published(weights, keep="in_place") as publisher,
        replica_of(arrays, publisher) as replica,
        ThreadPoolExecutor(1) as threads,
        at("withdrawn", lambda number: is_withdrawn.set()),
    ):
        publisher.publish(1)

        def publish_another():
            publisher.withdraw()
            fill(weights, 2)
            return publisher.publish(2)

        def wait_for_it():
            published_2.append(threads.submit(publish_another))
            assert is_withdrawn.wait(LIMIT)

        with at("leased", once(wait_for_it)):
            found = replica.check_live(timeout_seconds=LIMIT)
        assert (found.version, found.different) == (1, ())
        assert published_2[0].result(LIMIT).version == 2
        assert replica.check_live(2, timeout_seconds=LIMIT).different == ("a", "b")


def test_a_check_ends_in_time():
    weights, arrays = model(1), model(1)
    with (
        published(weights, keep="in_place") as publisher,
        replica_of(arrays, publisher) as replica,
    ):
        with pytest.raises(TransferTimeout, match="has none"):
            replica.check_live(timeout_seconds=SOON)
        with in_background(replica.check_live, timeout_seconds=LIMIT) as result:
            publisher.publish(3)
            assert result().version == 3
        with pytest.raises(TransferTimeout, match="version 4"):
            replica.check_live(4, timeout_seconds=SOON)
        with pytest.raises(VersionError, match="version 2"):
            replica.check_live(2, timeout_seconds=LIMIT)
        publisher.withdraw()
        with pytest.raises(VersionError, match="offered"):
            replica.check_live(timeout_seconds=LIMIT)
        publisher.close()
        with pytest.raises(PeerLost):
            replica.check_live(timeout_seconds=SOON)


def test_another_thread_may_close_a_replica_that_checks():
    with published(model(1)) as publisher, replica_of(model(1), publisher) as replica:
        with in_background(replica.check_live, timeout_seconds=LIMIT) as result:
            until(replica._updating.locked)
            with pytest.raises(TransportError, match="under way"):
                replica.update(timeout_seconds=LIMIT)
            replica.close()
            assert isinstance(result(), FlyweightError)
        with pytest.raises(TransportError, match="closed"):
            replica.check_live(timeout_seconds=LIMIT)


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_that_is_stopped_costs_a_check_its_time_and_nothing_else(processes, way):
    trainer = processes.trainer(keep="in_place", make=shared if way == "mapped" else plain)
    address, part = trainer.told(), Part(SHAPES)
    transport = "auto" if way == "mapped" else way
    with Replica(part.model, address, token=TOKEN, name="engine", transport=transport) as replica:
        trainer.send(("publish", 1, {"timeout_seconds": LIMIT}))
        trainer.told()
        trainer.stop()
        with pytest.raises(TransferTimeout):
            replica.check_live(timeout_seconds=SOON)
        trainer.go_on()
        assert replica.check_live(timeout_seconds=LIMIT).equal == ()
        replica.update(timeout_seconds=LIMIT)
        trainer.stop()
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()
        trainer.kill()
        assert replica.check_live(1, timeout_seconds=LIMIT).different == ()


# What is refused.


def test_what_has_nothing_to_compare_is_refused():
    trainer, engine = Trainer(), Fused()
    with published(trainer.model, keep="in_place", verify=False) as publisher:
        with replica_of(engine.as_rows, publisher) as replica:
            publisher.publish(1)
            with pytest.raises(VersionError, match="verify=True"):
                replica.check_live(timeout_seconds=LIMIT)
        with (
            replica_of(engine.take, publisher) as replica,
            pytest.raises(SpecError, match="rows="),
        ):
            replica.check_live(timeout_seconds=LIMIT)


def read_only(shape):
    found = np.zeros(shape, np.float32)
    found.flags.writeable = False
    return found


def upper(memory):
    return Row("k", Box((0, 0), (2, 8)), memory)


def lower(memory):
    return Row("k", Box((2, 0), (2, 8)), memory)


MEMORY = torch.zeros(20, 8)


@pytest.mark.parametrize(
    ("rows", "error", "word"),
    [
        ([Row("q", Box((1, 0), (6, 8)), MEMORY[:6])], PlanError, "'q'"),
        ([Row("q", Box((1,), (5,)), MEMORY[:5, 0])], PlanError, "'q'"),
        ([Row("q", whole("q"), MEMORY[:6].T)], ShapeMismatch, "'q'"),
        ([Row("v", whole("q"), MEMORY[:6])], PlanError, "'v'"),
        ([Row("q", whole("q"), "weight")], SpecError, "str"),
        ([Row("q", whole("q"), MEMORY[:6].double())], DTypeMismatch, "f64"),
        ([Row("q", whole("q"), MEMORY[:6].bfloat16())], DTypeMismatch, "cast=True"),
        ([Row("q", whole("q"), read_only((6, 8)))], SpecError, "read-only"),
        ([Row("q", whole("q"), MEMORY[:1].expand(6, 8))], SpecError, "strides"),
        ([Row("q", whole("q"), MEMORY[:6]), Row("k", whole("k"), MEMORY[5:9])], SpecError, "share"),
        ([upper(MEMORY[:2]), lower(MEMORY[:2])], SpecError, "share"),
        ([upper(MEMORY[:2]), lower(MEMORY[2:4].bfloat16())], DTypeMismatch, "bf16"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_named(rows, error, word):
    trainer = Trainer()
    target = Rows({"memory": MEMORY}, lambda tensors: rows)
    with published(trainer.model) as publisher:
        with pytest.raises(error, match=word):
            replica_of(target, publisher)
        (failed,) = publisher.publish(1).failed
        assert failed.error.startswith(error.__name__)


def test_rows_need_no_layout_and_take_no_files(tmp_path):
    rows = Fused().as_rows
    with pytest.raises(SpecError, match="fallback"):
        Replica(rows, ADDRESS, token=TOKEN, fallback=[tmp_path])
