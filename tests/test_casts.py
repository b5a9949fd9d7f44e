"""Casts have the bits of torch's casts, but one pattern for NaN, wherever and however items lie."""

import warnings
from itertools import product
from time import monotonic

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from child_processes import LIMIT  # noqa: E402
from flyweight.casts import (  # noqa: E402
    BF16,
    CASTABLE,
    F16,
    F32,
    INFINITY,
    ITEM_BYTES,
    NAN,
    PAIRS,
    PreparedCasts,
    cast,
)
from flyweight.cuda.cast_kernel import ITEMS, STEP_ITEMS, WHOLE, cast_tasks  # noqa: E402
from flyweight.digest import digest  # noqa: E402
from flyweight.errors import SpecError, TransferTimeout  # noqa: E402
from flyweight.memory import Buffer  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402

TORCH = (torch.float32, torch.bfloat16, torch.float16)
UNSIGNED = (np.uint32, np.uint16, np.uint16)
PATTERNS = np.arange(1 << 16, dtype=np.uint16)
NARROWING = [(F32, BF16), (F32, F16)]
by_name = pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{CASTABLE[pair[0]]}-{CASTABLE[pair[1]]}"
)


def by_torch(bits, pair):
    """Return the bits of torch's cast with our NaN, and which items became infinite."""
    source = torch.from_numpy(bits.copy()).view(TORCH[pair[0]])
    found = source.to(TORCH[pair[1]])
    result = found.view(torch.int32 if pair[1] == F32 else torch.int16)
    result = result.numpy().view(UNSIGNED[pair[1]]).copy()
    result[torch.isnan(source).numpy()] = NAN[pair[1]]
    return result, (torch.isinf(found) & torch.isfinite(source)).numpy()


def by_us(bits, pair):
    sink = np.full(len(bits), 0x5A5A, UNSIGNED[pair[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count = cast(bits.view(np.uint8), sink.view(np.uint8), pair)
    return sink, count


def check(bits, pair):
    expected, is_over = by_torch(bits, pair)
    found, count = by_us(bits, pair)
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), (
        f"{bits[wrong[0]]:#x} became {found[wrong[0]]:#x}, not {expected[wrong[0]]:#x}"
    )
    assert count == np.count_nonzero(is_over)


def random_bits(num_items, code, seed=7):
    return np.random.default_rng(seed).integers(
        0, 1 << 8 * ITEM_BYTES[code], num_items, dtype=UNSIGNED[code]
    )


def weights(num_items, code, seed=7):
    """Finite values of the size of weights, so that no overflow or NaN needs care."""
    values = np.random.default_rng(seed).standard_normal(num_items, dtype=np.float32) * 0.02
    return (
        by_torch(values.view(np.uint32), (F32, code))[0] if code != F32 else values.view(np.uint32)
    )


def boundaries(code):
    """Return f32 patterns: each value of a narrower dtype, each tie between two, and both neighbours."""
    if code == BF16:
        values = PATTERNS.astype(np.uint32) << 16
        exact = np.concatenate([values, values + np.uint32(0x8000)])
    else:
        values = PATTERNS[: INFINITY[F16] + 1].view(np.float16).astype(np.float64)
        values[-1] = 1 << 16  # where the next finite value would be
        ties = (values[1:] + values[:-1]) / 2
        exact = np.concatenate([values, ties]).astype(np.float32).view(np.uint32)
        exact = np.concatenate([exact, exact | np.uint32(1 << 31)])
    return np.concatenate([exact, exact - np.uint32(1), exact + np.uint32(1)])


@by_name
def test_all_patterns_of_16_bits_have_the_bits_of_torch(pair):
    upper = PATTERNS.astype(np.uint32) << 16
    check(upper if pair[0] == F32 else PATTERNS, pair)


@pytest.mark.parametrize("pair", NARROWING)
def test_values_at_and_beside_each_rounding_boundary_have_the_bits_of_torch(pair):
    check(boundaries(pair[1]), pair)


@by_name
def test_two_million_random_patterns_have_the_bits_of_torch(pair):
    check(random_bits(2_000_000, pair[0]), pair)


@pytest.mark.parametrize("pair", NARROWING)
def test_subnormals_of_both_dtypes_have_the_bits_of_torch(pair):
    rng = np.random.default_rng(7)
    subnormal = rng.integers(0, 1 << 23, 100_000, dtype=np.uint32)  # of f32
    scales = rng.integers(127 - 30, 127 - 10, 500_000, dtype=np.uint32) << 23  # around those of f16
    small = scales | rng.integers(0, 1 << 23, len(scales), dtype=np.uint32)
    both = np.concatenate([subnormal, small, np.arange(256, dtype=np.uint32)])
    check(np.concatenate([both, both | np.uint32(1 << 31)]), pair)


@by_name
def test_zeros_infinities_and_the_largest_values_have_the_bits_of_torch(pair):
    top = INFINITY[pair[0]]
    sign = 1 << 8 * ITEM_BYTES[pair[0]] - 1
    bits = [0, 1, top - 1, top, sign, sign | 1, sign | top - 1, sign | top]
    for few in ([each] for each in bits):
        check(np.array(few, UNSIGNED[pair[0]]), pair)
    check(np.array(bits, UNSIGNED[pair[0]]), pair)


@by_name
def test_every_kind_of_nan_becomes_one_pattern_wherever_it_is(pair):
    top, width = INFINITY[pair[0]], ITEM_BYTES[pair[0]]
    sign, quiet = 1 << 8 * width - 1, (top >> 1) & ~top
    payloads = [
        top | 1,
        top | 5,
        top | quiet,
        sign - 1,
        sign - 2,
        sign | top | 1,
        2 * sign - 1,
        2 * sign - 2,
    ]
    for payload, at in product(payloads, (0, 6, 69_999)):
        bits = weights(70_000, pair[0])
        bits[at] = payload
        check(bits, pair)
        assert by_us(bits, pair)[0][at] == NAN[pair[1]]


def test_the_patterns_of_nan_are_quiet_and_positive():
    assert NAN == (0x7FC00000, 0x7FC0, 0x7E00)


@by_name
def test_casts_do_not_depend_on_the_flushing_of_subnormals_by_the_thread(pair):
    bits = np.concatenate([random_bits(70_000, pair[0]), np.arange(1000, dtype=UNSIGNED[pair[0]])])
    expected, _ = by_torch(bits, pair)
    torch.set_flush_denormal(True)
    try:
        found, _ = by_us(bits, pair)
    finally:
        torch.set_flush_denormal(False)
    assert (found == expected).all()


@by_name
def test_unaligned_memory_is_cast_and_no_byte_beside_it_is_written(pair):
    widths = [ITEM_BYTES[each] for each in pair]
    for start, to, num_items in product(range(4), range(4), (0, 1, 70_001)):
        bits = random_bits(num_items, pair[0], seed=num_items)
        source, sink = (
            np.zeros(bits.nbytes + 16, np.uint8),
            np.full(num_items * widths[1] + 16, 77, np.uint8),
        )
        source[start : start + bits.nbytes] = bits.view(np.uint8)
        end = to + num_items * widths[1]
        count = cast(source[start : start + bits.nbytes], sink[to:end], pair)
        expected, is_over = by_torch(bits, pair)
        assert sink[to:end].tobytes() == expected.tobytes()
        assert count == np.count_nonzero(is_over)
        assert set(sink[:to].tolist() + sink[end:].tolist()) == {77}


def buffer_of(array):
    return Buffer(
        array.ctypes.data, array.shape, array.strides, array.itemsize, array, array.flags.writeable
    )


class Rows:
    """Pairs of arrays, cast from one to the other."""

    def __init__(self):
        self.sources, self.sinks, self.pairs = [], [], []

    def add(self, source, pair, sink=None):
        self.sources.append(source)
        self.sinks.append(
            np.full(source.shape, 0x5A5A, UNSIGNED[pair[1]]) if sink is None else sink
        )
        self.pairs.append(pair)

    @property
    def tables(self):
        return [BufferTable.of(list(map(buffer_of, each))) for each in (self.sinks, self.sources)]

    @property
    def dtypes(self):
        return list(np.array(self.pairs, np.int64).reshape(-1, 2).T)

    def expected(self):
        found = [
            by_torch(each.reshape(-1), pair)
            for each, pair in zip(self.sources, self.pairs, strict=True)
        ]
        return [bits for bits, _ in found], [np.count_nonzero(is_over) for _, is_over in found]

    def check(self):
        bits, counts = self.expected()
        prepared = PreparedCasts(*self.tables, *self.dtypes)
        for _ in range(2):
            for each in self.sinks:
                each[...] = 0x5A5A
            assert prepared.run(monotonic() + LIMIT).tolist() == counts
            for sink, each in zip(self.sinks, bits, strict=True):
                assert (sink.reshape(-1) == each).all()
        digests = PreparedCasts(None, self.tables[1], *self.dtypes)
        for kind in ("words", "xxh3"):
            found, again = digests.digests(kind, monotonic() + LIMIT)
            assert found.tolist() == [digest(each.view(np.uint8), kind) for each in bits]
            assert again.tolist() == counts


def unaligned(bits, start=1):
    held = np.zeros(bits.nbytes + 8, np.uint8)
    held[start : start + bits.nbytes] = bits.view(np.uint8).reshape(-1)
    return held[start : start + bits.nbytes].view(bits.dtype).reshape(bits.shape)


def test_rows_of_all_pairs_sizes_and_strides_are_cast_and_digested():
    rows = Rows()
    for seed, (pair, num_items) in enumerate(
        product(PAIRS, (1, 5, 4096, 32_768, 32_769, 65_536, 200_003))
    ):
        rows.add(random_bits(num_items, pair[0], seed), pair)
        rows.add(unaligned(weights(num_items, pair[0], seed)), pair)
    for pair in PAIRS:
        bits, wide = random_bits(360_000, pair[0]), np.empty((2, 720_000), UNSIGNED[pair[1]])
        rows.add(bits.reshape(600, 600).T, pair)
        rows.add(bits.reshape(600, 600)[::-1, 1::3], pair)
        rows.add(
            bits[:60_000].reshape(20, 30, 100).transpose(2, 0, 1),
            pair,
            wide[0, :120_000].reshape(100, 20, 60)[:, :, ::2],
        )
        rows.add(bits.reshape(600, 600), pair, wide[1].reshape(600, 1200)[:, 300:900])
        rows.add(bits[:1].reshape(()), pair)
        rows.add(bits[:0].reshape(0, 3), pair)
        rows.add(bits[::2], pair)
    rows.check()


def test_a_row_of_many_parts_is_cast_and_digested_by_several_threads():
    rows = Rows()
    for pair in ((F32, BF16), (BF16, F32), (BF16, F16)):
        rows.add(random_bits(3_000_001, pair[0]), pair)
    rows.add(random_bits(2_600_000, F32).reshape(1300, 2000).T, (F32, F16))
    rows.check()


def test_very_many_small_rows_have_their_own_digests_and_overflows():
    rows, bits = Rows(), {code: random_bits(1 << 20, code) for code in (F32, BF16, F16)}
    for n in range(20_000):
        pair = PAIRS[n % 6]
        rows.add(bits[pair[0]][n : n + n % 67], pair)
    rows.check()


def test_no_rows_are_cast():
    rows = Rows()
    assert PreparedCasts(*rows.tables, *rows.dtypes).run(monotonic() + LIMIT).tolist() == []
    assert (
        PreparedCasts(None, rows.tables[1], *rows.dtypes)
        .digests("words", monotonic() + LIMIT)[0]
        .tolist()
        == []
    )


def test_a_second_run_casts_what_the_source_holds_then():
    rows = Rows()
    rows.add(weights(50_000, F32), (F32, BF16))
    prepared = PreparedCasts(*rows.tables, *rows.dtypes)
    assert prepared.run(monotonic() + LIMIT).tolist() == [0]
    rows.sources[0][:] = random_bits(50_000, F32)
    prepared.run(monotonic() + LIMIT)
    assert (rows.sinks[0] == by_torch(rows.sources[0], (F32, BF16))[0]).all()


def test_other_dtypes_sizes_and_shapes_are_refused():
    data = np.zeros(8, np.uint8)
    for pair in ((F32, F32), (F32, 3), (-1, F16)):
        with pytest.raises(SpecError, match="no cast from"):
            cast(data, data, pair)
    with pytest.raises(SpecError, match="8 bytes of f32 do not become 8 bytes of bf16"):
        cast(data, data.copy(), (F32, BF16))
    rows = Rows()
    rows.add(random_bits(6, F32).reshape(2, 3), (F32, BF16), np.zeros((3, 2), np.uint16))
    with pytest.raises(SpecError, match="shapes"):
        PreparedCasts(*rows.tables, *rows.dtypes)
    with pytest.raises(SpecError, match="items of 4 bytes in row 0 of the source, bf16 has 2"):
        PreparedCasts(*rows.tables, np.array([BF16]), np.array([F16]))
    with pytest.raises(SpecError, match="1 rows of the source have 2 dtypes"):
        PreparedCasts(None, rows.tables[1], np.array([F32, F32]), np.array([F16, F16]))


def test_memory_of_a_device_and_read_only_sinks_are_refused():
    source, sink = random_bits(4, F32), np.zeros(4, np.uint16)
    on_device = Buffer(4096, (4,), (4,), 4, None, device=0)
    codes = np.array([F32]), np.array([BF16])
    with pytest.raises(SpecError, match="host"):
        PreparedCasts(None, BufferTable.of([on_device]), *codes)
    sink.flags.writeable = False
    with pytest.raises(SpecError, match="read-only"):
        PreparedCasts(
            BufferTable.of([buffer_of(sink)]), BufferTable.of([buffer_of(source)]), *codes
        )


def test_a_deadline_that_has_passed_ends_casts_and_digests():
    rows = Rows()
    rows.add(random_bits(4, F32), (F32, BF16))
    with pytest.raises(TransferTimeout, match="casts of 1 blocks"):
        PreparedCasts(*rows.tables, *rows.dtypes).run(monotonic() - 1)
    with pytest.raises(TransferTimeout):
        PreparedCasts(None, rows.tables[1], *rows.dtypes).digests("words", monotonic() - 1)


def test_tasks_of_a_device_cover_each_item_once_and_whole_steps_are_aligned():
    rng = np.random.default_rng(7)
    pairs = np.array(PAIRS)[rng.integers(0, 6, 500)]
    num_items = rng.integers(0, 300_000, 500) * rng.integers(0, 2, 500)
    sink = np.cumsum(num_items * 4 + 64) // 16 * 16 + rng.choice([0, 0, 2, 4, 5], 500)
    source = sink * 3 // 16 * 16 + rng.choice([0, 0, 2, 4, 5], 500)
    tasks = cast_tasks(np.stack([sink, source, num_items, np.arange(500)], axis=1), *pairs.T)
    done = np.zeros(500, np.int64)
    for pair, how, parts in tasks:
        assert len(parts)
        for to, at, items, row in parts.tolist():
            offset = to - sink[row]
            assert tuple(pairs[row]) == pair
            assert offset == done[row] * ITEM_BYTES[pair[1]]
            assert at - source[row] == done[row] * ITEM_BYTES[pair[0]]
            done[row] += items
            if how == WHOLE:
                assert (to % 16, at % 16, items % STEP_ITEMS) == (0, 0, 0)
            elif how == ITEMS:
                assert (to % ITEM_BYTES[pair[1]], at % ITEM_BYTES[pair[0]]) == (0, 0)
    assert (done == num_items).all()
