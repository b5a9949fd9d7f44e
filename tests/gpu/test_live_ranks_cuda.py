"""Many trainer ranks and many engine ranks on one GPU, each a process of its own."""

import signal
from contextlib import ExitStack

import pytest

torch = pytest.importorskip("torch")

import flyweight as fw  # noqa: E402
from child_processes import LIMIT, SPAWN, Child  # noqa: E402
from rank_processes import free_ports  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

ROWS, COLUMNS = 1030, 512
TOKEN = "a token that nobody guesses"


def whole(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "w": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16(),
        "bias": torch.randn(COLUMNS, generator=generator),
        "stage_0": torch.randn(3 << 18, generator=generator),
        "stage_1": torch.randn(100, generator=generator),
    }


def part(version, rank):
    """Return what a trainer rank holds: uneven rows, a copy of the bias, a stage of its own."""
    model = whole(version)
    rows = slice(0, 600) if rank == 0 else slice(600, ROWS)
    return {
        "w": fw.Sharded(model["w"][rows].cuda(), (ROWS, COLUMNS), (rows.start, 0)),
        "bias": model["bias"].cuda(),
        f"stage_{rank}": model[f"stage_{rank}"].cuda(),
    }


def trainer(address, rank, options, pipe):
    model = part(1, rank)
    with fw.Publisher(
        model, address, token=TOKEN, rank=rank, world_size=2, timeout_seconds=2 * LIMIT, **options
    ) as it:
        pipe.send("up")
        while (version := pipe.recv()) is not None:
            for name, leaf in part(version, rank).items():
                held = model[name]
                of = lambda each: each.tensor if isinstance(each, fw.Sharded) else each  # noqa: E731
                of(held).copy_(of(leaf))
            try:
                pipe.send(it.publish(version, num_replicas=1, timeout_seconds=LIMIT))
                it.withdraw()
            except fw.FlyweightError as error:
                pipe.send(error)


def engine(address, rank, transport, pipe):
    """Take versions as one of two ranks, which cut the columns of `w` between them."""
    half = COLUMNS // 2
    model = {
        "w": fw.Sharded(
            torch.zeros(ROWS, half, dtype=torch.bfloat16, device="cuda"),
            (ROWS, COLUMNS),
            (0, rank * half),
        ),
        **{name: torch.zeros_like(each).cuda() for name, each in whole(1).items() if name != "w"},
    }
    with fw.Replica(
        model, address, token=TOKEN, name="engine", rank=rank, world_size=2, transport=transport
    ) as replica:
        while pipe.recv() is not None:
            try:
                report = replica.update(timeout_seconds=2 * LIMIT)
            except fw.FlyweightError as error:
                pipe.send((str(replica.state), replica.version, str(error)))
                continue
            wanted = whole(report.version)
            wanted["w"] = wanted["w"][:, rank * half : (rank + 1) * half]
            right = [
                torch.equal((leaf.tensor if name == "w" else leaf).cpu(), wanted[name])
                for name, leaf in model.items()
            ]
            pipe.send((str(replica.state), report.version, right))


def started(stack, address, options):
    children = [
        stack.enter_context(Child(trainer, address, rank, options, context=SPAWN))
        for rank in range(2)
    ]
    for each in children:
        assert each.told(2 * LIMIT) == "up"
    return children


@pytest.mark.parametrize("options", [{}, {"keep": "memory"}, {"keep": "in_place"}], ids=str)
@pytest.mark.parametrize("transport", ["auto", "filled", "read"])
def test_two_trainer_ranks_fill_two_engine_ranks(options, transport):
    address = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:
        trainers = started(stack, address, options)
        engines = [
            stack.enter_context(Child(engine, address, rank, transport, context=SPAWN))
            for rank in range(2)
        ]
        for version in (1, 2, 3):
            for each in (*engines, *trainers):
                each.send(version)
            for each in trainers:
                report = each.told(2 * LIMIT)
                assert not isinstance(report, Exception), report
                assert not report.failed, report
            for each in engines:
                found = each.told()
                assert found == ("READY", version, [True] * 4), found
        for each in (*engines, *trainers):
            each.send(None)


def test_a_killed_trainer_rank_is_named_and_new_ones_serve_the_engine():
    address, transport = f"tcp://127.0.0.1:{free_ports(1)[0]}", "auto"
    with ExitStack() as stack:
        first, second = started(stack, address, {})
        engines = [
            stack.enter_context(Child(engine, address, rank, transport, context=SPAWN))
            for rank in range(2)
        ]
        for each in (*engines, first, second):
            each.send(1)
        assert first.told(2 * LIMIT).failed == ()
        assert [each.told()[:2] for each in engines] == [("READY", 1)] * 2
        first.send(2)
        second.kill(signal.SIGKILL)
        assert "1" in str(first.told(3 * LIMIT))  # as lost, or as one of those that did not come
        first.send(None)
        assert first.join() == 0
        trainers = started(stack, address, {})
        for each in (*engines, *trainers):
            each.send(3)
        for each in trainers:
            assert each.told(2 * LIMIT).failed == ()
        assert [each.told() for each in engines] == [("READY", 3, [True] * 4)] * 2
        for each in (*engines, *trainers):
            each.send(None)
