"""Packed tables of messages with any numbers in them: refused, or exactly what they say."""

import tracemalloc
from collections import Counter
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flyweight.adapters.model import adapt
from flyweight.copies import Copiers
from flyweight.errors import FlyweightError, PlanError, SpecError, TransportError
from flyweight.live import frames, messages
from flyweight.live.meeting import blocks_alone
from flyweight.live.memory_sink import MemorySink
from flyweight.live.messages import Begin, Memory
from flyweight.live.rank_messages import Ended
from flyweight.live.remote_source import RemoteSource
from flyweight.live.report import PublishReport, ReplicaReport
from flyweight.live.source import PublishedSource
from flyweight.memory import Buffer
from flyweight.plans import copy_table
from flyweight.plans.copy_table import BoxTable, plan_copies
from flyweight.plans.tables import Boxes, Pieces, Places, Tensors, numbers, packed
from flyweight.spec.box import Box
from flyweight.spec.dtype import dtype_named
from flyweight.spec.manifest import TensorSpec
from flyweight.transports.shared_memory import SharedMemoryHandle
from peers import agreed, tensors, want

SHAPES = [(4, 6), (3,), (), (2, 0)]
WHOLE = BoxTable.whole([TensorSpec(dtype_named("u8"), shape) for shape in SHAPES])
ODD = [0, 1, 2, 3, 5, 6, 7, -1, -2, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63), 2**63 - 4]


@pytest.mark.parametrize("num_dims", [0, -1, -(2**63), 65, 2**40])
def test_a_table_of_no_or_too_many_dims_is_refused(num_dims):
    for count in (0, 2, 65):
        with pytest.raises(SpecError, match="are not rows of"):
            numbers(packed([0] * count), num_dims)


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 15, 17, 24])
def test_a_column_that_is_cut_off_is_refused(num_bytes):
    with pytest.raises(SpecError, match=f"{num_bytes} bytes are not rows of 2 numbers"):
        numbers(bytes(num_bytes), 2)


def test_boxes_of_more_dims_than_any_tensor_are_refused():
    """Every table of the other side would be made as wide: a short message takes much memory."""
    wide = Boxes(64, packed([0]), packed([0] * 64), packed([1] * 64))
    with pytest.raises(SpecError, match="boxes have 64 dims, the tensors 2"):
        wide.table(WHOLE)


@given(
    st.lists(st.sampled_from(ODD), max_size=4),
    st.lists(st.sampled_from(ODD), max_size=8),
    st.lists(st.sampled_from(ODD), max_size=8),
    st.sampled_from([1, 2, 3]),
)
@example([0], [0, 2**63 - 1], [1, 1], 2)  # offset + shape is less than nothing in 64 bits
@example([1], [2], [1], 1)
@example([-1], [0, 0], [1, 0], 2)
@example([0], [0, 0], [-1, 1], 2)
@example([0], [-1, 0], [1, 1], 2)
@example([0], [0, 0], [4, 7], 2)
def test_boxes_are_inside_of_their_tensors_or_refused(tensor, offset, shape, num_dims):
    table = Boxes(num_dims, packed(tensor), packed(offset), packed(shape))
    try:
        found = table.table(WHOLE)
    except SpecError:
        found = None
    is_right = num_dims <= 2 and len(offset) == len(shape) == num_dims * len(tensor)
    is_right = is_right and all(0 <= each < len(SHAPES) for each in tensor)
    for row, number in enumerate(tensor if is_right else ()):
        sizes = (1, 1, *SHAPES[number])[-2:]
        low = (0, *offset[num_dims * row : num_dims * (row + 1)])[-2:]
        lengths = (1, *shape[num_dims * row : num_dims * (row + 1)])[-2:]
        is_right &= all(
            at >= 0 and length >= 0 and at + length <= size
            for at, length, size in zip(low, lengths, sizes, strict=True)
        )
    assert (found is not None) == is_right
    if found is not None:
        assert found.tensor.tolist() == tensor


MODEL = {"w": np.arange(24, dtype=np.uint8).reshape(4, 6), "v": np.zeros(3, np.float32)}
SOURCE = blocks_alone(PublishedSource.of(adapt(MODEL), Copiers()))


@settings(max_examples=300)
@given(st.data())
def test_a_want_with_changed_bytes_is_planned_or_refused(data):
    """No other error may come out, and no copy may leave its blocks."""
    pairs = [(0, Box((0, 0), (4, 3))), (0, Box((0, 3), (4, 3))), (1, Box((0,), (3,)))]
    frame = bytearray(frames.encode(want(SOURCE.described, pairs, may_leave=True)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(3, len(frame) - 1))
        new = data.draw(st.sampled_from([*map(packed, ([each] for each in ODD)), b"\0", b"\xff"]))
        frame[at : at + len(new)] = new
    try:
        asked = frames.decode_from_replica(bytes(frame))
        if not isinstance(asked, messages.Want):
            return
        agreement = SOURCE.plan(asked)
    except FlyweightError:
        return
    read = agreement.whole.regions
    held = SOURCE.boxes.shape[read.block]
    assert (read.offset >= 0).all()
    assert (read.offset + read.shape <= held).all()


def test_tensors_that_are_whole_are_planned_without_boxes():
    written_out = [(0, Box((0, 0), (4, 6))), (1, Box((0,), (3,)))]
    expected = SOURCE.plan(want(SOURCE.described, written_out)).whole.regions
    short = MemorySink({name: each.copy() for name, each in MODEL.items()}).want(SOURCE.tensors, {})
    found = SOURCE.plan(short)
    assert short.blocks is None
    assert SOURCE.agreed().sources is None
    for name in ("block", "offset", "shape"):
        assert getattr(found.whole.regions, name).tolist() == getattr(expected, name).tolist()
    source = RemoteSource(SOURCE.agreed(), SOURCE.tensors, {}, short, OwnMemory())
    assert source.copies.source.tolist() == [0, 1]
    assert source.nbytes == found.nbytes == 24 + 12


# Memory that a publisher describes: 8 rows of 6 bytes in a slot, of which a replica maps a part.

SLOT = np.arange(48, dtype=np.uint8)
SPECS = {"w": TensorSpec(dtype_named("u8"), (4, 6))}
HANDLE = SharedMemoryHandle(session="here", key="slot", offset=0, nbytes=48)


class OwnMemory:
    """A transport that opens this process's own memory, and the only one there is."""

    def of(self, handle):
        return self

    def open(self, handle):
        return Buffer.of(SLOT)

    def close_handle(self, handle):
        pass


def remote(pairs):
    asked = want(tensors(("w", "u8", (4, 6))), pairs)
    told = agreed([(0, Box((0, 0), (4, 6)))])
    return RemoteSource(told, SPECS, {}, asked, OwnMemory())


def begin(places=(), pieces=(), bucket_slots=None):
    """Return the start of a round: rows (source, handle, start, strides) and pieces."""
    columns = [[each[n] for each in places] for n in range(4)]
    parts = [[each[n] for each in pieces] for n in range(5)]
    memory = Memory(
        (HANDLE,),
        Places(2, *map(packed, columns[:3]), packed(np.ravel(columns[3]).astype(np.int64))),
        {0: HANDLE},
        dict.fromkeys(range(2), 0) if bucket_slots is None else bucket_slots,
        Pieces(
            2,
            *map(packed, parts[:2]),
            *(packed(np.ravel(each).astype(np.int64)) for each in parts[2:4]),
            packed(parts[4]),
        ),
    )
    return Begin(1, 1, 7, None, "published", "host", True, "xxh3", None, 1, memory, {})


def items_of(source):
    """Return how often each item of each copy comes, after checking where it is read."""
    seen, base = Counter(), Buffer.of(SLOT).address
    for each in [source.mapped, *source.buckets.values()]:
        for row, copy in enumerate(each.copy.tolist()):
            address, strides = int(each.memory.address[row]), each.memory.strides[row].tolist()
            shape = each.shape[row].tolist()
            for inner in product(*map(range, shape)):
                at = address + sum(n * stride for n, stride in zip(inner, strides, strict=True))
                assert 0 <= at - base < len(SLOT), "outside of what was offered"
                offset = each.offset[row].tolist()
                seen[(copy, *(a + b for a, b in zip(offset, inner, strict=True)))] += 1
    return seen


TWO_WAYS = {
    "two halves": [(0, 0, (0, 0), (2, 6), 0), (1, 0, (2, 0), (2, 6), 12)],
    "two columns": [(0, 0, (0, 0), (4, 3), 0), (1, 0, (0, 3), (4, 3), 12)],
    "a column, and rows that cross it": [(0, 0, (0, 0), (4, 3), 0), (1, 0, (2, 0), (2, 6), 12)],
    "a half twice": [(0, 0, (0, 0), (2, 6), 0), (1, 0, (0, 0), (2, 6), 12)],
    "a half": [(0, 0, (0, 0), (2, 6), 0)],
    "halves that overlap": [(0, 0, (0, 0), (3, 6), 0), (1, 0, (2, 0), (2, 6), 18)],
    "nothing": [],
}


@pytest.mark.parametrize("kind", TWO_WAYS)
def test_pieces_that_do_not_bring_each_item_once_are_refused(kind):
    source = remote(CUTS[0])
    if kind == "two halves":
        source.open(begin(pieces=TWO_WAYS[kind]))
        assert set(items_of(source).values()) == {1}
    else:
        with pytest.raises(TransportError, match="come"):
            source.open(begin(pieces=TWO_WAYS[kind]))


OUTSIDE = {
    "after the memory": ([(0, 0, 25, (6, 1))], []),
    "before the memory": ([(0, 0, -1, (6, 1))], []),
    "strides that leave it": ([(0, 0, 0, (15, 1))], []),
    "negative strides": ([(0, 0, 0, (-6, 1))], []),
    "strides that wrap around": ([(0, 0, 0, ((2**64 + 2) // 3, 1))], []),
    "a start that wraps around": ([(0, 0, 2**63 - 1, (6, 1))], []),
    "a piece after its slot": ([], [(0, 0, (0, 0), (4, 6), 25)]),
    "a piece before its slot": ([], [(0, 0, (0, 0), (4, 6), -1)]),
    "a piece before its block": ([], [(0, 0, (-1, 0), (5, 6), 0)]),
    "a piece after its block": ([], [(0, 0, (0, 0), (5, 6), 0)]),
    "a piece that starts too late": ([], [(0, 0, (1, 0), (4, 6), 0)]),
    "a piece that wraps around": ([], [(0, 0, (0, 0), (2**62, 4), 0)]),
    "no items": ([], [(0, 0, (0, 0), (0, 6), 0), (1, 0, (0, 0), (4, 6), 0)]),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_memory_outside_of_what_was_offered_is_refused(kind):
    with pytest.raises(TransportError, match="reaches from|outside of its block|no memory has"):
        remote(CUTS[0]).open(begin(*OUTSIDE[kind]))


CUTS = [
    [(0, Box((0, 0), (4, 6)))],
    [(0, Box((0, 0), (2, 6))), (0, Box((2, 0), (2, 6)))],
    [(0, Box((0, 0), (4, 2))), (0, Box((0, 2), (4, 4)))],
]
RIGHT = [
    ([[0, 0, 0, (6, 1)]], []),
    ([[0, 0, 24, (6, 1)]], []),
    ([[0, 0, 47, (-6, -1)]], []),
    ([[0, 0, 0, (1, 4)]], []),
    ([], [[0, 0, (0, 0), (4, 6), 24]]),
    ([], [[0, 0, (0, 0), (1, 6), 0], [0, 0, (1, 0), (3, 6), 6]]),
    ([], [[0, 0, (0, 0), (3, 6), 0], [1, 0, (3, 0), (1, 2), 0], [1, 0, (3, 2), (1, 4), 2]]),
]
"""Places and pieces that bring everything."""


@pytest.mark.parametrize("cuts", CUTS, ids=["whole", "rows", "columns"])
@pytest.mark.parametrize("right", RIGHT)
def test_memory_that_is_right_is_opened(cuts, right):
    """Else what follows would prove nothing."""
    source = remote(cuts)
    source.open(begin(*right))
    assert items_of(source) == items_wanted(cuts)


def items_wanted(cuts):
    wanted = [
        (n, *index) for n, (_, box) in enumerate(cuts) for index in product(*map(range, box.shape))
    ]
    return Counter(wanted)


@settings(max_examples=500)
@given(st.sampled_from(CUTS), st.sampled_from(RIGHT), st.data())
def test_memory_with_other_numbers_is_inside_and_whole_or_refused(cuts, right, data):
    places, pieces = ([list(row) for row in rows] for rows in right)
    number = st.sampled_from(ODD) | st.integers(-8, 50)
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.sampled_from([*places, *pieces]))
        column = data.draw(st.integers(0, len(row) - 1))
        value = row[column]
        if isinstance(value, tuple):
            at = data.draw(st.integers(0, 1))
            row[column] = (*value[:at], data.draw(number), *value[at + 1 :])
        else:
            row[column] = data.draw(number)
    source = remote(cuts)
    try:
        source.open(begin(places, pieces))
    except TransportError:
        return
    assert items_of(source) == items_wanted(cuts)


@pytest.mark.parametrize("column", ["bucket", "source", "offset", "shape", "at"])
@pytest.mark.parametrize("change", [b"", bytes(8), bytes(3), bytes(16), bytes(48)])
def test_columns_of_pieces_of_different_lengths_are_refused(column, change):
    told = begin(pieces=TWO_WAYS["two halves"])
    if len(change) % 8 == 0 and len(getattr(told.memory.pieces, column)) == len(change):
        change += bytes(8)
    pieces = msgspec.structs.replace(told.memory.pieces, **{column: change})
    memory = msgspec.structs.replace(told.memory, pieces=pieces)
    with pytest.raises(TransportError):
        remote(CUTS[0]).open(msgspec.structs.replace(told, memory=memory))


# Small messages must not take gigabytes, nor minutes.


def test_blocks_of_the_publisher_that_overlap_are_refused():
    asked = want(tensors(("w", "u8", (4, 6))), [(0, Box((0, 0), (4, 6)))])
    for second, refused in ((Box((1, 0), (3, 6)), True), (Box((2, 0), (2, 6)), False)):
        told = agreed([(0, Box((0, 0), (2, 6))), (0, second)])
        if refused:
            with pytest.raises(PlanError, match="twice"):
                RemoteSource(told, SPECS, {}, asked, OwnMemory())
        else:
            assert len(RemoteSource(told, SPECS, {}, asked, OwnMemory()).copies) == 2


def test_boxes_of_a_replica_that_overlap_are_each_filled():
    copies = remote([(0, Box((0, 0), (3, 6))), (0, Box((1, 0), (3, 6)))]).copies
    assert copies.sink.tolist() == [0, 1]
    assert copies.source_offset.tolist() == [[0, 0], [1, 0]]


def many(count, box, num_tensors=1):
    return BoxTable(
        np.arange(count) % num_tensors,
        np.tile(np.array(box.offset), (count, 1)),
        np.tile(np.array(box.shape), (count, 1)),
    )


def peak_bytes(work):
    tracemalloc.start()
    try:
        with pytest.raises(FlyweightError) as refused:
            work()
        return str(refused.value), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_small_want_cannot_make_a_plan_of_very_many_copies():
    """A thousand boxes that each need all of two thousand blocks are two million copies."""
    rows = 2000
    sources = BoxTable.of([(0, Box((n, 0), (1, 2))) for n in range(rows)])
    sinks = many(1000, Box((0, 0), (rows, 2)))
    text, peak = peak_bytes(lambda: plan_copies(sources, sinks, ["w"]))
    assert "'w' has 2000 boxes" in text
    assert peak < 4 << 20


def test_many_tensors_cannot_make_a_plan_of_very_many_copies_either(monkeypatch):
    monkeypatch.setattr(copy_table, "MAX_COPIES", 10_000)
    sources = BoxTable.of([(t, Box((n, 0), (1, 2))) for t in range(50) for n in range(20)])
    names = [str(n) for n in range(50)]
    allowed = many(500, Box((0, 0), (20, 2)), num_tensors=50)
    assert len(plan_copies(sources, allowed, names)) == 10_000
    with pytest.raises(PlanError, match="more than 10000 copies"):
        plan_copies(sources, many(550, Box((0, 0), (20, 2)), num_tensors=50), names)


def test_a_small_message_cannot_make_very_many_parts_of_copies():
    """Each piece of a block is compared with each copy of it."""
    tensor = TensorSpec(dtype_named("u8"), (3000,))
    asked = want(tensors(("w", "u8", (3000,))), [(0, Box((n,), (1,))) for n in range(3000)])
    told = agreed([(0, Box((0,), (3000,)))])
    source = RemoteSource(told, {"w": tensor}, {}, asked, OwnMemory())
    zeros = packed([0] * 10_000)
    pieces = Pieces(1, zeros, zeros, zeros, packed([1] * 10_000), zeros)
    nothing = packed([])
    memory = Memory((), Places(1, nothing, nothing, nothing, nothing), {0: HANDLE}, {0: 0}, pieces)
    told = Begin(1, 1, 7, None, "published", "host", True, "xxh3", None, 1, memory, {})
    text, peak = peak_bytes(lambda: source.open(told))
    assert "30000000 parts" in text
    assert peak < 4 << 20


def test_texts_that_are_not_utf8_are_escaped_wherever_a_message_has_them():
    error = TransportError("no such file: a\udcff")
    report = PublishReport(7, 0, 0.0, 0.0, (ReplicaReport("engine", 1, error=error),))
    ended = frames.decode_from_publisher(frames.encode(Ended(report, error)))
    (replica,) = ended.report.replicas
    assert str(replica.error) == str(ended.error) == "no such file: a\\udcff"
    wanted = messages.Want(Tensors((), (), b""), None, ("a\udcff",), b"\xff", False, ())
    found = frames.decode_from_replica(frames.encode(wanted))
    assert (found.places, found.place) == (("a\\udcff",), b"\xff")
