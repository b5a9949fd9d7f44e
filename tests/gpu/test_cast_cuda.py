"""Casts on a GPU give the bytes of the casts on the host, wherever and however the items lie."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from child_processes import LIMIT  # noqa: E402
from flyweight.casts import BF16, CASTABLE, F16, F32, ITEM_BYTES, NAN, PAIRS, cast  # noqa: E402
from flyweight.cuda import cast_kernel  # noqa: E402
from flyweight.cuda.cast_kernel import DeviceCasts  # noqa: E402
from flyweight.errors import SpecError, TransferTimeout  # noqa: E402
from flyweight.memory import Buffer  # noqa: E402
from flyweight.memory_table import BufferTable  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

TORCH = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int16, torch.int16)
by_name = pytest.mark.parametrize(
    "pair", PAIRS, ids=lambda pair: f"{CASTABLE[pair[0]]}-{CASTABLE[pair[1]]}"
)


def buffer_of(tensor):
    width = tensor.element_size()
    strides = tuple(width * stride for stride in tensor.stride())
    return Buffer(
        tensor.data_ptr(), tuple(tensor.shape), strides, width, tensor, device=tensor.get_device()
    )


def row_major_bytes(tensor):
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def casts_of(rows):
    """Prepare casts of rows of (source, sink, pair)."""
    sinks, sources = ([buffer_of(row[side]) for row in rows] for side in (1, 0))
    codes = np.array([row[2] for row in rows], np.int64).reshape(-1, 2).T
    return DeviceCasts(BufferTable.of(sinks), BufferTable.of(sources), *codes)


def check(rows):
    expected, counts = [], []
    for source, sink, pair in rows:
        items = row_major_bytes(source) if source.numel() else np.empty(0, np.uint8)
        expected.append(np.empty(sink.numel() * ITEM_BYTES[pair[1]], np.uint8))
        counts.append(cast(items, expected[-1], pair))
    casts = casts_of(rows)
    for _ in range(2):  # counts start at zero each time
        for _, sink, _ in rows:
            sink.fill_(3)
        assert casts.wait(LIMIT).tolist() == counts
        for (_, sink, pair), wanted in zip(rows, expected, strict=True):
            found = row_major_bytes(sink) if sink.numel() else np.empty(0, np.uint8)
            wrong = np.flatnonzero(found != wanted)
            assert not len(wrong), f"{CASTABLE[pair[0]]}-{CASTABLE[pair[1]]}: byte {wrong[0]}"


def empty(shape, code):
    return torch.empty(shape, dtype=INTEGERS[code], device="cuda")


def random_items(num_items, code, seed=7):
    width = ITEM_BYTES[code]
    generator = torch.Generator(device="cuda").manual_seed(seed)
    data = torch.randint(
        0, 256, (num_items * width,), generator=generator, device="cuda", dtype=torch.uint8
    )
    return data.view(INTEGERS[code])


def f32_edges():
    """Return f32 patterns: each exponent and sign with random mantissas and those of boundaries."""
    upper = np.arange(1 << 9, dtype=np.uint32)[:, None] << 23
    rng = np.random.default_rng(7)
    # Ties of bf16 are at multiples of 2**15; of f16 at those of 2**12, and higher for subnormals.
    steps = np.concatenate([np.arange(0, 1 << 23, 1 << 12), 1 << np.arange(23)])
    steps = np.concatenate([steps + each for each in (-1, 0, 1)])
    steps = np.concatenate([steps, rng.integers(0, 1 << 23, 2000)]) % (1 << 23)
    bits = (upper | steps.astype(np.uint32)[None, :]).reshape(-1)
    return torch.from_numpy(bits.view(np.int32)).cuda()


def all_items(code):
    if code == F32:
        return f32_edges()
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cuda").to(torch.int16)


@by_name
def test_all_patterns_of_16_bits_and_all_boundaries_of_f32_are_cast_as_on_the_host(pair):
    items = all_items(pair[0])
    check([(items, empty(len(items), pair[1]), pair)])


@by_name
def test_values_have_the_bits_of_torch_on_the_device_and_nan_has_one_pattern(pair):
    items = torch.cat([all_items(pair[0]), random_items(4_000_000, pair[0])])
    sink = empty(len(items), pair[1])
    counts = casts_of([(items, sink, pair)]).wait(LIMIT)
    values = items.view(TORCH[pair[0]])
    expected = values.to(TORCH[pair[1]])
    is_nan = torch.isnan(values)
    assert torch.equal(sink[~is_nan], expected.view(INTEGERS[pair[1]])[~is_nan])
    assert set(sink[is_nan].unique().tolist()) == {NAN[pair[1]]}
    assert counts.tolist() == [int((torch.isinf(expected) & torch.isfinite(values)).sum())]


@by_name
def test_unaligned_rows_and_odd_sizes_are_cast_and_nothing_beside_them_is_written(pair):
    source = random_items(60_000, pair[0]).view(torch.uint8)
    sink = torch.full((60_000 * 4,), 77, dtype=torch.uint8, device="cuda")
    widths = [ITEM_BYTES[each] for each in pair]
    for num_items in (0, 1, 3, 2047, 2048, 2049, 40_001):
        for at, to in ((0, 0), (1, 0), (0, 1), (2, 2), (4, 4), (3, 1), (16, 8), (16, 32), (7, 5)):
            of = Buffer(
                source.data_ptr() + at, (num_items,), (widths[0],), widths[0], source, device=0
            )
            into = Buffer(
                sink.data_ptr() + to, (num_items,), (widths[1],), widths[1], sink, device=0
            )
            codes = [np.array([each]) for each in pair]
            sink.fill_(77)
            counts = DeviceCasts(BufferTable.of([into]), BufferTable.of([of]), *codes).wait(LIMIT)
            items = source[at : at + num_items * widths[0]].cpu().numpy().copy()
            end = to + num_items * widths[1]
            wanted = np.empty(end - to, np.uint8)
            assert counts.tolist() == [cast(items, wanted, pair)]
            found = sink.cpu().numpy()
            assert (found[to:end] == wanted).all()
            assert (found[:to] == 77).all()
            assert (found[end:] == 77).all()


def test_strided_rows_scalars_and_empty_rows_are_cast(monkeypatch):
    monkeypatch.setattr(cast_kernel, "SCRATCH_BYTES", 30_000)
    rows = []
    for pair in PAIRS:
        items = random_items(360_000, pair[0])
        square = items.view(600, 600)
        rows += [
            (square.t(), empty((600, 600), pair[1]), pair),
            (square, empty((600, 1200), pair[1])[:, 300:900], pair),
            (square[::2, 1::3], empty((200, 300), pair[1]).t(), pair),
            (
                items[:60_000].view(20, 30, 100).permute(2, 0, 1),
                empty((100, 20, 30), pair[1]),
                pair,
            ),
            (items[0], empty((), pair[1]), pair),
            (items[:0].view(0, 5).t(), empty((5, 0), pair[1]), pair),
        ]
    check(rows)


def test_a_strided_row_larger_than_the_scratch_is_cast():
    items = random_items(12 << 20, F32).view(4096, -1).t()
    check([(items, empty(items.shape, BF16), (F32, BF16))])


def test_very_many_small_rows_of_all_pairs_are_cast_in_one_call():
    items = {code: random_items(40_000, code) for code in (F32, BF16, F16)}
    held = {code: empty(20_000 * 80, code) for code in (F32, BF16, F16)}
    rows, codes = [], [PAIRS[n % 6] for n in range(20_000)]
    for n, pair in enumerate(codes):
        size = n % 79
        rows.append((items[pair[0]][n : n + size], held[pair[1]][80 * n : 80 * n + size], pair))
    casts = casts_of(rows)
    counts = casts.wait(LIMIT).tolist()
    sources = {code: each.cpu().view(torch.uint8).numpy() for code, each in items.items()}
    sinks = {code: each.cpu().view(torch.uint8).numpy() for code, each in held.items()}
    for n, pair in enumerate(codes):
        size, (width, sink_width) = n % 79, (ITEM_BYTES[each] for each in pair)
        wanted = np.empty(size * sink_width, np.uint8)
        assert counts[n] == cast(sources[pair[0]][n * width : (n + size) * width], wanted, pair)
        at = 80 * n * sink_width
        assert (sinks[pair[1]][at : at + len(wanted)] == wanted).all()


def test_a_round_takes_no_memory_of_the_device():
    items = random_items(1 << 20, F32).view(1024, 1024)
    casts = casts_of(
        [
            (items, empty((1024, 1024), F16), (F32, F16)),
            (items.t(), empty((1024, 1024), BF16), (F32, BF16)),
        ]
    )
    casts.wait(LIMIT)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    casts.wait(LIMIT)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_work_queued_before_is_cast_and_a_deadline_is_kept():
    items, sink = torch.zeros(1 << 20, dtype=torch.int32, device="cuda"), empty(1 << 20, BF16)
    casts = casts_of([(items, sink, (F32, BF16))])
    casts.wait(LIMIT)
    torch.cuda._sleep(1_000_000_000)  # about half a second
    items.fill_(0x3F800000)
    with pytest.raises(TransferTimeout, match="0.01"):
        casts.wait(0.01)
    casts.wait(LIMIT)
    assert torch.equal(sink, torch.full_like(sink, 0x3F80))


def test_memory_of_the_host_is_refused():
    items, sink = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int16)
    tables = [
        BufferTable.of([Buffer(each.data_ptr(), (8,), (width,), width, each)])
        for each, width in ((sink, 2), (items, 4))
    ]
    with pytest.raises(SpecError, match="one device"):
        DeviceCasts(*tables, np.array([F32]), np.array([BF16]))


def test_no_rows_have_no_counts():
    assert casts_of([]).wait(LIMIT).tolist() == []
