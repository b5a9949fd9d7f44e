"""Rounds from one host to others: what arrives, how, and how much of it is sent."""

import ast
import itertools
import os
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import flyweight as fw
from conftest import odd_arrays, random_bytes, zeros_like
from flyweight.live.watch import watch
from netns import two_hosts
from peers import shared
from rank_processes import run_ranks
from remote_processes import (
    MIB,
    SECONDS,
    TOKEN,
    Actor,
    Engine,
    Remote,
    Trainer,
    needs_nixl,
    published,
)
from versioned_models import weights


@pytest.fixture
def hosts():
    with two_hosts() as hosts:
        yield hosts


@contextmanager
def pair(hosts, model=None, target=None, engine_options=None, kind=Engine, **options):
    """A trainer on the first host, and an engine on the second."""
    with Remote(hosts.a, Trainer, hosts.a.ip, model=model, **options) as trainer:
        made = {"model": target, **(engine_options or {})}
        with Remote(hosts.b, kind, trainer.address, **made) as engine:
            yield trainer, engine


def taken(trainer, engine, version, strategy="network"):
    """Publish a version to an engine, and return the bytes that it has then."""
    engine.start("update")
    assert trainer.ask("publish", version, num_replicas=1) == {"engine": strategy}
    assert engine.end() == (version, strategy)
    return engine.ask("bytes")


def as_bytes(model):
    return {name: each.tobytes() for name, each in model.items()}


@pytest.mark.parametrize("should_verify", [True, False])
def test_versions_arrive_in_place(hosts, should_verify):
    many_buckets = {"nbytes": MIB, "bucket_bytes": 1 << 14}
    made = {"nbytes": MIB}
    with pair(hosts, None, None, made, should_verify=should_verify, **many_buckets) as (
        trainer,
        engine,
    ):
        for version in (1, 2, 3):
            assert published(trainer, version, engine) == {"engine": "network"}
        assert engine.ask("verified") == ("live" if should_verify else "nothing")


def small_tensors(seed):
    rng = np.random.default_rng(seed)
    return {f"w{n}": rng.random(n % 40, np.float32) for n in range(5000)}


def strided_tensors(seed):
    """Tensors whose items lie apart, in runs that are long, short, and of one item."""
    rng = np.random.default_rng(seed)
    tied = rng.random((300, 7))
    return {
        **odd_arrays(seed),
        "transposed.large": rng.random((500, 300)).T,
        "runs.long": rng.random((40, 1000))[::2, :600],
        "runs.short": rng.random((1000, 40))[:, ::2],
        "runs.of.runs": rng.random((6, 5, 4, 700))[::2, :, 1:3, :512],
        "backwards": rng.random((30, 600))[::-1],
        "one": tied,
        "the.same": tied,
    }


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (small_tensors, {}),
        (strided_tensors, {}),
        (strided_tensors, {"transport": "host"}),
        pytest.param(small_tensors, {"transport": "host"}, marks=pytest.mark.check),
        pytest.param(small_tensors, {"bucket_bytes": 4096}, marks=pytest.mark.campaign),
        pytest.param(strided_tensors, {"bucket_bytes": 4096}, marks=pytest.mark.campaign),
    ],
)
def test_tensors_of_every_kind_arrive(hosts, make, options):
    model = make(1)
    target = zeros_like(model)
    if "one" in model:
        target["the.same"] = target["one"]
    with pair(hosts, model, target, **options) as (trainer, engine):
        for version in (1, 2):
            assert taken(trainer, engine, version) == as_bytes(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"transport": "host"},
        pytest.param({"network_engine": "nixl"}, marks=[needs_nixl, pytest.mark.check]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [0, 1])
def test_only_what_a_replica_wants_is_sent(hosts, dim, options):
    """If tensors are cut by columns, it wants a short run of each row."""
    model = {"w": np.random.default_rng(1).integers(0, 2**14, (4096, 512), np.int16)}
    layout = fw.ModelLayout.from_json(
        f'{{"mesh": {{"tp": 2}}, "rules": [{{"names": ["w"], "cut": {{"{dim}": "tp"}}}}]}}'
    )
    half = np.split(model["w"], 2, axis=dim)[1]
    target, wanted = {"w": np.zeros_like(half)}, {"w": half.tobytes()}
    cut = {"layout": layout, "layout_rank": 1}
    strategy = "network:nixl" if "network_engine" in options else "network"
    with pair(hosts, model, target, cut, bucket_bytes=1 << 18, **options) as (trainer, engine):
        sent = hosts.a.sent_bytes()
        assert taken(trainer, engine, 1, strategy) == wanted
        assert half.nbytes < hosts.a.sent_bytes() - sent < 1.1 * half.nbytes


class LoaderEngine(Engine):
    """An engine whose own function loads the tensors."""

    def make(self, address, **options):
        super().make(address, **{**options, "model": self._load, "framework": "numpy"})
        self.model = {}

    def _load(self, named):
        self.model = {name: each.copy() for name, each in named}


def test_a_loader_gets_whole_tensors(hosts):
    with pair(hosts, kind=LoaderEngine, bucket_bytes=1 << 16) as (trainer, engine):
        for version in (1, 2):
            assert taken(trainer, engine, version) == as_bytes(weights(version))


def test_memory_of_another_host_cannot_be_mapped(hosts):
    with pair(hosts, transport="mapped") as (trainer, engine):
        engine.start("update")
        report, raised = trainer.ask("publish", 1, num_replicas=1), engine.end()
        assert raised.kind == "PlanError"
        for text in (report["engine"], raised.text):
            assert "another host cannot map" in text
            assert "transport=" in text
        assert engine.ask("held", (999,)) == ("empty", None, 999)


def test_a_snapshot_is_served_to_another_host(hosts, tmp_path):
    fw.save(weights(4), tmp_path / "run", version=4)
    with pair(hosts, lambda: fw.open(tmp_path / "run")) as (_, engine):
        assert engine.ask("update") == (4, "network")
        assert engine.ask("held") == ("ready", 4, 4)


def test_who_joins_late_gets_what_is_held(hosts):
    with pair(hosts, hold=True) as (trainer, engine):
        assert trainer.ask("publish", 1) == {}
        assert engine.ask("update") == (1, "network")
        trainer.ask("assign", 0)  # the copy that is held is another one
        with Remote(hosts.b, Engine, trainer.address, name="late") as late:
            assert late.ask("update") == (1, "network")
            assert late.ask("held") == ("ready", 1, 1)
            assert set(published(trainer, 2, engine, late)) == {"engine", "late"}


def test_who_joins_late_gets_the_newest_snapshot(hosts, tmp_path):
    for version in (2, 3):
        fw.save(weights(version), tmp_path / "run", version=version)
    with pair(hosts, store=tmp_path / "run") as (trainer, engine):
        assert engine.ask("update") == (3, "network")
        assert engine.ask("held") == ("ready", 3, 3)
        published(trainer, 4, engine)


@pytest.mark.parametrize("options", [{}, {"hold": True}, {"transport": "host"}], ids=str)
def test_weights_may_change_once_a_lease_says_so(hosts, options):
    hosts.a.rate(200)
    with pair(hosts, bucket_bytes=1 << 16, depth=1, **options) as (trainer, engine):
        for version in (1, 2):
            engine.start("update")
            assert trainer.ask("lease", version, num_replicas=1) == {"engine": "network"}
            assert engine.end() == (version, "network")
            assert engine.ask("held") == ("ready", version, version)


@pytest.mark.parametrize("strategy", ["host", "mapped"])
def test_a_replica_of_the_same_host_shares_memory(hosts, strategy):
    model = weights(2, 4 * MIB)
    if strategy == "mapped":
        model = {"w": shared(random_bytes(4 * MIB))}
    target = {name: np.zeros_like(each) for name, each in model.items()}
    with (
        pair(hosts, model, target) as (trainer, engine),
        Remote(hosts.a, Engine, trainer.address, model=target, name="near") as near,
    ):
        near.start("update")
        sent = hosts.a.sent_bytes()
        assert trainer.ask("publish", 1, num_replicas=1) == {"near": strategy}
        assert near.end() == (1, strategy)
        assert hosts.a.sent_bytes() - sent < 10_000
        engine.start("update")
        near.start("update")
        found = trainer.ask("publish", 2, num_replicas=2)
        assert found == {"engine": "network", "near": strategy}
        assert (engine.end(), near.end()) == ((2, "network"), (2, strategy))
        assert engine.ask("bytes") == near.ask("bytes") == as_bytes(model)


class Watcher(Actor):
    """Sees what a publisher does."""

    def make(self, address):
        self._news = watch(address, token=TOKEN, timeout_seconds=SECONDS)

    def until(self, version):
        """Return how a version got to replicas, once it is there."""
        for news in self._news:
            if (news.version, news.state) == (version, "idle"):
                return news.strategy, [each.name for each in news.replicas]
        return None


def test_a_publisher_is_watched_from_another_host(hosts):
    with pair(hosts) as (trainer, engine), Remote(hosts.b, Watcher, trainer.address) as watcher:
        watcher.start("until", 1)
        published(trainer, 1, engine)
        assert watcher.end() == ("network", ["engine"])


WHOLE = np.random.default_rng(5).random((6, 4000))
COLUMNS = fw.ModelLayout.from_json(
    '{"mesh": {"tp": 2}, "rules": [{"names": ["w"], "cut": {"1": "tp"}}]}'
)


@contextmanager
def engine_of_two(hosts, address):
    """The two ranks of an engine, each with half of the columns of a tensor."""
    options = {"layout": COLUMNS, "num_ranks": 2}
    halves = [{"w": np.zeros((6, 2000))} for _ in range(2)]
    with (
        Remote(hosts[0], Engine, address, model=halves[0], rank=0, **options) as first,
        Remote(hosts[1], Engine, address, model=halves[1], rank=1, **options) as second,
    ):
        yield first, second


def taken_together(trainers, ranks, version, whole):
    """Publish a version to an engine of two ranks; both must have their half of it."""
    for each in ranks:
        each.start("update")
    for each in trainers:
        each.start("publish", version, num_replicas=1)
    assert [each.end() for each in trainers] == [{"engine": "network"}] * len(trainers)
    assert [each.end() for each in ranks] == [(version, "network")] * 2
    for each, half in zip(ranks, np.split(whole, 2, axis=1), strict=True):
        assert each.ask("bytes") == {"w": half.tobytes()}


def test_ranks_of_an_engine_commit_together(hosts):
    with (
        Remote(hosts.a, Trainer, hosts.a.ip, model={"w": WHOLE}) as trainer,
        engine_of_two([hosts.b, hosts.b], trainer.address) as ranks,
    ):
        for version in (1, 2):
            taken_together([trainer], ranks, version, WHOLE)


class TorchRank(Trainer):
    """One of the ranks that hold the rows of a tensor, with a process group of torch."""

    def make(self, ip, port, rank, num_ranks, **options):
        import torch.distributed as dist

        os.environ |= {"MASTER_ADDR": ip, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "eth0"}
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        self._first, self._last = 6 * rank // num_ranks, 6 * (rank + 1) // num_ranks
        part = fw.Sharded(self._rows(0), WHOLE.shape, (self._first, 0))
        return super().make(ip, model={"w": part}, process_group=dist.group.WORLD, **options)

    def _rows(self, version):
        return WHOLE[self._first : self._last] + version

    def assign(self, version):
        self.model["w"].tensor[:] = self._rows(version)


def publish_by_ranks(trainers_at, ranks_at, options):
    """Publish from ranks on hosts 'a' and 'b' to the two ranks of an engine."""
    options = ast.literal_eval(options)
    with two_hosts() as hosts, ExitStack() as stack:
        at = hosts._asdict()
        trainers = [
            Remote(at[each], TorchRank, hosts.a.ip, 29513, rank, len(trainers_at),
                   is_awaited=False, **options)
            for rank, each in enumerate(trainers_at)
        ]  # fmt: skip
        for each in trainers:
            stack.enter_context(each).made()
        ranks = stack.enter_context(
            engine_of_two([at[each] for each in ranks_at], trainers[0].address)
        )
        for version in (1, 2):
            taken_together(trainers, ranks, version, WHOLE + version)


@pytest.mark.parametrize(
    ("trainers_at", "ranks_at", "options"),
    [
        ("ab", "bb", {}),
        pytest.param("aba", "aa", {}, marks=pytest.mark.check),
        *(
            pytest.param(*each, marks=pytest.mark.campaign)
            for each in itertools.product(
                ("ab", "aba"), ("bb", "aa"), ({"bucket_bytes": 4096}, {"transport": "host"})
            )
        ),
    ],
)
def test_ranks_of_a_trainer_on_two_hosts_publish_together(trainers_at, ranks_at, options):
    run_ranks(0, __file__, "publish_by_ranks", trainers_at, ranks_at, options)
