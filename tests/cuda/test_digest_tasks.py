"""The tasks of the digest kernel, added up on the CPU; no device is needed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flyweight.cuda.digest_kernel import digest_tasks
from flyweight.digest import ROW_BYTES, ROW_WORDS, digest, fmix, splitmix
from flyweight.memory import Buffer

STEP_BYTES, TASK_BYTES = 4 * ROW_BYTES, 128 * ROW_BYTES
SIZES = st.integers(0, 3 * TASK_BYTES) | st.builds(
    lambda steps, more: max(steps * STEP_BYTES + more, 0), st.integers(0, 70), st.integers(-1, 1)
)


def numbers(values):
    return np.array(values, np.int64)


def sum_of_rows(first_row, padded):
    """Return what the kernel adds for whole rows: the formula of flyweight.digest."""
    a, b = (splitmix(np.arange(2 * ROW_WORDS, dtype=np.uint64)) | np.uint64(1)).reshape(2, -1)
    x = padded.view("<u8").reshape(-1, ROW_WORDS) * a
    sums = ((x ^ (x >> np.uint64(32))) * b).sum(axis=1)
    rows = np.arange(first_row, first_row + len(sums), dtype=np.uint64)
    return (fmix(sums) * (splitmix(rows) | np.uint64(1))).sum()


def row_by_row(address, nbytes, first_row, index):
    unit = 16 if address % 16 == 0 else 8 if address % 8 == 0 else 1
    whole = nbytes - nbytes % STEP_BYTES if unit > 1 else 0
    for start, end, each in ((0, whole, unit), (whole, nbytes, 1)):
        for at in range(start, end, TASK_BYTES):
            size = min(TASK_BYTES, end - at)
            yield each, (address + at, size, first_row + at // ROW_BYTES, index)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), SIZES, st.integers(0, 9))))
def test_tasks_are_those_of_each_block_alone(blocks):
    rows = [(*each, 2 * n) for n, each in enumerate(blocks)]
    expected = {16: [], 8: [], 1: []}
    for row in rows:
        for unit, task in row_by_row(*row):
            expected[unit].append(task)
    columns = zip(*rows, strict=True) if rows else ((),) * 4
    found = digest_tasks(*map(numbers, columns))
    assert all(each.dtype == np.int64 and each.flags.c_contiguous for each in found.values())
    assert {unit: list(map(tuple, each.tolist())) for unit, each in found.items()} == {
        unit: tasks for unit, tasks in expected.items() if tasks
    }


@given(st.lists(st.tuples(SIZES, st.integers(0, 40)), min_size=1, max_size=4))
def test_tasks_add_up_to_the_digest(blocks):
    sizes = numbers([nbytes for nbytes, _ in blocks])
    gaps = numbers([gap for _, gap in blocks])
    starts = np.cumsum(sizes + gaps) - sizes
    memory = np.random.default_rng(1).integers(0, 256, int((sizes + gaps).sum()) + 1, np.uint8)
    index = np.arange(len(blocks))
    sums = np.zeros(len(blocks), np.uint64)
    tasks = digest_tasks(memory.ctypes.data + starts, sizes, np.zeros_like(index), index)
    for unit, each in tasks.items():
        for address, nbytes, first_row, number in each.tolist():
            assert address % unit == 0
            assert unit == 1 or nbytes % STEP_BYTES == 0  # the kernel reads no byte beyond
            padded = np.zeros(-(-nbytes // ROW_BYTES) * ROW_BYTES, np.uint8)
            padded[:nbytes] = Buffer.flat_at(address, nbytes, None).items()
            sums[number : number + 1] += sum_of_rows(first_row, padded)
    expected = [digest(memory[at : at + size]) for at, size in zip(starts, sizes, strict=True)]
    assert fmix(fmix(sizes.astype(np.uint64)) + sums).tolist() == expected
