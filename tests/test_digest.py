import random
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign import budget
from child_processes import LIMIT
from conftest import random_bytes
from flyweight.digest import (
    ROW_BYTES,
    ROW_WORDS,
    XXH3_ROW_BYTES,
    Digest,
    checksum,
    digest,
    small_digests,
)

KINDS = ("words", "xxh3")
ROWS = (("words", ROW_BYTES), ("xxh3", XXH3_ROW_BYTES))

MASK = 2**64 - 1


def splitmix(index):
    x = (index + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def fmix(x):
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def xxh3_by_the_book(data):
    """The digest of rows by XXH3, as docs/format.md defines it, in Python's own integers."""
    total = fmix(len(data))
    for row in range(-(-len(data) // XXH3_ROW_BYTES)):
        held = xxhash.xxh3_64_intdigest(data[row * XXH3_ROW_BYTES : (row + 1) * XXH3_ROW_BYTES])
        total += fmix(held) * (splitmix(row) | 1)
    return fmix(total & MASK)


def by_the_book(data):
    """The digest as docs/format.md defines it, word by word, in Python's own integers."""
    padded = data + bytes(-len(data) % ROW_BYTES)
    total = fmix(len(data))
    for row in range(len(padded) // ROW_BYTES):
        held = 0
        for column in range(ROW_WORDS):
            at = row * ROW_BYTES + 8 * column
            word = int.from_bytes(padded[at : at + 8], "little")
            mixed = word * (splitmix(column) | 1) & MASK
            mixed ^= mixed >> 32
            held += mixed * (splitmix(column + ROW_WORDS) | 1)
        total += fmix(held & MASK) * (splitmix(row) | 1)
    return fmix(total & MASK)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 8191, 8192, 8193, 20_000])
def test_the_digest_is_the_one_in_the_book(nbytes):
    data = random_bytes(nbytes)
    assert digest(data) == by_the_book(data.tobytes())


@pytest.mark.parametrize("nbytes", [0, 1, 9, 262_143, 262_144, 262_145, 1_000_000])
def test_the_digest_by_xxh3_is_the_one_in_the_book(nbytes):
    data = random_bytes(nbytes)
    assert digest(data, "xxh3") == xxh3_by_the_book(data.tobytes())


def test_the_digest_of_known_bytes_never_changes():
    data = np.arange(256, dtype=np.uint8)
    assert f"{digest(data):016x}" == "baa7544b90888366"
    assert f"{digest(data, 'xxh3'):016x}" == "78854b70873a1fec"
    for kind in KINDS:
        assert f"{digest(np.empty(0, np.uint8), kind):016x}" == "0000000000000000"


@given(st.integers(0, 70_000), st.randoms(use_true_random=False), st.sampled_from(KINDS))
@settings(max_examples=budget(40, 2000))
def test_pieces_in_any_order_make_the_same_digest(nbytes, rng, kind):
    if kind == "xxh3":
        nbytes *= 10  # whose rows are longer
    data = random_bytes(nbytes)
    cuts = sorted(rng.randrange(nbytes + 1) for _ in range(rng.randrange(6)))
    pieces = list(zip([0, *cuts], [*cuts, nbytes], strict=True))
    rng.shuffle(pieces)
    running = Digest(nbytes, kind)
    for start, end in pieces:
        running.add(start, data[start:end])
    assert running.value() == digest(data, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_threads_make_the_same_digest(kind):
    data = random_bytes(1 << 20)
    running = Digest(len(data), kind)
    step = 12_345

    def add(first):
        for start in range(first * step, len(data), 4 * step):
            running.add(start, data[start : start + step])

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert running.value() == digest(data, kind)


def test_a_digest_of_missing_bytes_is_refused():
    running = Digest(10)
    running.add(0, random_bytes(9))
    with pytest.raises(AssertionError, match="1 of 10 bytes were never added"):
        running.value()


@pytest.mark.parametrize("kind", KINDS)
def test_every_single_flipped_bit_is_seen(kind):
    data = random_bytes(ROW_BYTES + 40)
    before = digest(data, kind)
    rng = random.Random(0)
    for at in [*range(64), *rng.sample(range(len(data)), 400)]:
        for bit in range(8):
            data[at] ^= 1 << bit
            assert digest(data, kind) != before
            data[at] ^= 1 << bit


@pytest.mark.parametrize("kind", KINDS)
def test_swapped_words_are_seen_even_if_they_differ_by_a_sign(kind):
    # bf16 x and -x in the top lane of two words: the hardest pair for a weighted sum.
    for filling in ("random", "ones"):
        words = np.frombuffer(random_bytes(3 * ROW_BYTES).tobytes(), np.uint64).copy()
        if filling == "ones":
            words[:] = 0x3F803F803F803F80
        for lane in range(4):
            rng = random.Random(lane)
            for _ in range(100):
                i, j = rng.sample(range(len(words)), 2)
                changed = words.copy()
                changed[j] = changed[i] ^ np.uint64(1 << (16 * lane + 15))
                before = digest(changed.view(np.uint8), kind)
                changed[[i, j]] = changed[[j, i]]
                assert digest(changed.view(np.uint8), kind) != before


def test_no_two_columns_have_weights_that_cancel():
    # Words that differ in their top bit only move the sum by 2**31 * (+-B[i] +- B[j]), so
    # neither the sum nor the difference of two weights may vanish modulo 2**33.
    weights = [splitmix(column) | 1 for column in range(2 * ROW_WORDS)]  # those of `by_the_book`
    a, b = weights[:ROW_WORDS], weights[ROW_WORDS:]
    assert len({sign * weight % 2**33 for weight in b for sign in (1, -1)}) == 2 * ROW_WORDS
    assert len(set(a)) == ROW_WORDS


@pytest.mark.parametrize(("kind", "row_bytes"), ROWS)
def test_swapped_and_shifted_rows_are_seen(kind, row_bytes):
    data = random_bytes(4 * row_bytes)
    before = digest(data, kind)
    rows = data.reshape(4, row_bytes)
    assert digest(rows[[1, 0, 2, 3]].reshape(-1), kind) != before
    assert digest(np.roll(data, 64), kind) != before
    assert digest(np.roll(data, row_bytes), kind) != before


@pytest.mark.parametrize(("kind", "row_bytes"), ROWS)
def test_zeros_of_another_length_are_another_tensor(kind, row_bytes):
    lengths = [0, 1, 8, row_bytes, row_bytes + 1, 2 * row_bytes]
    assert len({digest(np.zeros(n, np.uint8), kind) for n in lengths}) == len(lengths)


def test_the_checksum_is_xxh3():
    assert checksum(np.frombuffer(b"flyweight", np.uint8)) == 0x6509CA2BE5334716


def test_many_small_digests_are_those_of_one_by_one():
    rng = np.random.default_rng(5)
    sizes = [0, 1, 7, 8, 9, 8191, 8192, 8193, 3 * 8192, 16 * 8192, *rng.integers(0, 131072, 60)]
    tensors = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    for kind in KINDS:
        assert small_digests(tensors, kind) == [digest(each, kind) for each in tensors]
        assert small_digests([], kind) == []
