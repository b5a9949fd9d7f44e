"""What the ranks of a save send each other is checked like a file."""

import json
import re
import socket
import threading

import numpy as np
import pytest

import flyweight as fw
from child_processes import LIMIT
from flyweight.adapters.model import adapt
from flyweight.errors import FormatError, PlanError, SpecError
from flyweight.ranks.group import MESSAGES, Group
from flyweight.transports.channel import Channel
from flyweight.transports.wire import Wire
from flyweight.verbs.agree import begin_version
from flyweight.verbs.commit import SaveOptions, write_and_commit


class Liar(Group):
    """A rank whose messages are changed on their way out, by step."""

    def gather(self, step, message):
        return super().gather(step, self.lies.get(step, lambda each: each)(message))

    def scatter(self, step, messages):
        lie = self.lies.get(step, lambda each: each)
        return super().scatter(step, [lie(each) for each in messages])


def half(rank=0):
    tensor = fw.Sharded(np.zeros((2, 3), "f4"), shape=(4, 3), offset=(2 * rank, 0))
    return adapt({"w": tensor, "step": 3})


def save_as_two(root, liar, lies, source=half, **options):
    """Save by two ranks, one of which lies; return what the other one raises."""
    ends = [
        Channel(Wire(each), f"rank {1 - rank}", MESSAGES)
        for rank, each in enumerate(socket.socketpair())
    ]
    for rank, each in enumerate(ends):
        each.authenticate(b"key", is_reader=rank == 1)
    kinds = [Liar if rank == liar else Group for rank in range(2)]
    groups = [
        kind(rank, 2, 0, connections={1 - rank: ends[rank]}, timeout_seconds=LIMIT)
        for rank, kind in enumerate(kinds)
    ]
    groups[liar].lies = lies
    errors, asked = [None, None], SaveOptions(**options)

    def save(rank):
        try:
            with groups[rank] as group:
                model = source(rank)
                write_and_commit(begin_version(model, root, asked, group))
        except fw.FlyweightError as error:
            errors[rank] = error

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    return errors[1 - liar]


def test_one_rank_of_several_is_refused_alone_also_if_it_holds_a_whole_tensor(tmp_path):
    half = fw.Sharded(np.zeros((2, 3), "f4"), shape=(4, 3), offset=(0, 0))
    with pytest.raises(PlanError, match="hold 6 of the 12 elements of 'w'"):
        fw.save({"v": np.ones(5), "w": half}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_that_do_not_lie_save_together(tmp_path):
    assert save_as_two(tmp_path, 1, {}) is None
    assert fw.versions(tmp_path) == [0]


def changed(message, *path, to):
    """Return a deep copy of the message with one entry replaced."""
    if not path:
        return to
    copy = dict(message) if isinstance(message, dict) else list(message)
    copy[path[0]] = changed(message[path[0]], *path[1:], to=to)
    return copy


W = ("tensors", "w")


def box(offset, shape):
    return {"offset": offset, "shape": shape}


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((), None),
        ((), []),
        (("run",), 3),
        (("version",), "3"),
        (("tied",), None),
        (("tensors",), ["w"]),
        ((*W, "dtype"), "f33"),
        ((*W, "dtype"), 4),
        ((*W, "shape"), [4, -3]),
        ((*W, "shape"), [4, "3"]),
        ((*W, "shape"), [2**70, 3]),
        ((*W, "boxes", 0), {"offset": [0, 0]}),
        ((*W, "boxes", 0), box([0, 0], [2])),
        ((*W, "boxes", 0), box([3, 0], [2, 3])),
        ((*W, "boxes", 0), box([0, -1], [2, 3])),
        (("tied",), {"v": 1}),
        (("values",), {"step": [3]}),
        (("tensors",), {"bad\nname": {"dtype": "f32", "shape": [], "boxes": []}}),
    ],
    ids=str,
)
def test_a_request_that_is_not_well_formed_is_refused_and_leaves_nothing(tmp_path, path, to):
    lies = {"agree": lambda message: changed(message, *path, to=to)}
    error = save_as_two(tmp_path, 1, lies)
    assert isinstance(error, (FormatError, SpecError)), error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "written", [None, {}, {"written": 3, "replicas": []}, {"written": "{}", "replicas": []},
                {"written": "{}", "replicas": ["1"]}], ids=str,
)  # fmt: skip
def test_what_a_rank_says_it_wrote_is_checked_before_the_commit(tmp_path, written):
    error = save_as_two(tmp_path, 1, {"written": lambda message: written})
    assert isinstance(error, FormatError), error
    assert list(tmp_path.iterdir()) == []


def test_a_version_of_which_a_rank_wrote_nothing_is_not_committed(tmp_path):
    def nothing(message):
        manifest = json.loads(message["written"])
        return {**message, "written": json.dumps({**manifest, "tensors": {}, "parts": []})}

    error = save_as_two(tmp_path, 1, {"written": nothing})
    assert isinstance(error, FormatError)
    assert "'w' has 6 of its 12 elements" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_sends_more_digests_than_asked_for_is_named(tmp_path):
    def more(message):
        return {**message, "replicas": [*message["replicas"], 1]}

    error = save_as_two(
        tmp_path, 1, {"written": more}, lambda rank: adapt({"w": np.zeros(4), "v": np.ones(4)})
    )
    assert isinstance(error, FormatError)
    assert "rank 1 sent 2 digests of 1 boxes" in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["digest", "sampled"])
@pytest.mark.parametrize("num_elements", [1, 4, 100_000])
def test_ranks_whose_replicas_differ_are_refused(tmp_path, how, num_elements):
    def source(rank):
        return adapt({"v": np.arange(num_elements, dtype="f4") + rank})

    error = save_as_two(tmp_path, 1, {}, source, check_replicas=how)
    assert isinstance(error, PlanError)
    assert re.search("'v' .* has digest .* on rank 0 and .* on rank 1", str(error))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((), "go"),
        (("version",), None),
        (("draft",), "../elsewhere"),
        (("share", 0, 0), "unknown"),
        (("share", 0, 1), box([2, 0], [9, 3])),
        (("same",), [["w"]]),
    ],
    ids=str,
)
def test_a_share_that_is_not_well_formed_is_refused(tmp_path, path, to):
    lies = {"begin": lambda message: changed(message, *path, to=to)}
    error = save_as_two(tmp_path, 0, lies)
    assert isinstance(error, FormatError), error
    assert list(tmp_path.iterdir()) == []
