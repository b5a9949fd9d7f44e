import gc
import threading

import numpy as np
import pytest

from child_processes import LIMIT
from flyweight.memory import (
    Buffer,
    Staging,
    block_of,
    bytes_of,
    collector_paused,
    first_overlap,
    items_of,
    page_memory,
)
from flyweight.spec.box import Box


def buffer_of(array):
    address = array.__array_interface__["data"][0]
    return Buffer(address, array.shape, array.strides, array.itemsize, array)


BASE = np.arange(120, dtype=np.float32).reshape(4, 5, 6)


@pytest.mark.parametrize(
    "array",
    [
        BASE,
        BASE.T,
        BASE[::2],
        BASE[::-1],
        BASE[:, ::-2, 1:4],
        BASE[1, 2, 3:4].reshape(()),
        BASE[:0],
        np.arange(6, dtype=np.complex128),
    ],
    ids=lambda a: f"{a.shape}{a.strides}",
)
def test_a_buffer_shows_the_items_where_they_lie(array):
    buffer = buffer_of(array)
    items = buffer.items()
    assert items.size == 0 or items.shape == array.shape
    assert items.tobytes() == array.tobytes()
    assert buffer.nbytes == array.nbytes
    assert buffer.is_contiguous == array.flags.c_contiguous
    assert array.size == 0 or np.may_share_memory(items, array)


def test_writing_to_a_buffers_items_changes_the_array():
    array = np.zeros((3, 4), np.float16).T
    buffer_of(array).items()[...] = np.arange(12, dtype=np.uint16).reshape(4, 3)
    assert array.view(np.uint16).tolist() == np.arange(12).reshape(4, 3).tolist()


def test_flat_is_none_unless_the_bytes_are_in_order():
    assert buffer_of(BASE).flat().tobytes() == BASE.tobytes()
    assert buffer_of(BASE.T).flat() is None


def test_a_block_of_a_scalar_is_a_view():
    scalar = np.zeros((), np.uint32)
    block_of(scalar, Box((), ()))[...] = 5
    assert scalar == 5


def test_items_and_bytes_are_views_of_each_other():
    data = bytes_of(bytearray(range(24)))
    items = items_of(data, 4, (2, 3))
    items[1, 2] = 0
    assert data[20:].tolist() == [0, 0, 0, 0]
    assert len(bytes_of(b"")) == 0


FAR = 0x7F00_0000_0000
"""An address that nothing here lies at: whoever reads there ends the process."""


def items_at(address, *, device, shape=(4, 6), strides=(24, 4)):
    return Buffer(address, shape, strides, 4, None, device=device)


@pytest.mark.parametrize("device", [None, 0, 1])
def test_buffers_that_overlap_are_found_on_any_device_by_their_addresses(device):
    first = items_at(FAR, device=device)
    for other in (
        items_at(FAR + 92, device=device),
        items_at(FAR - 92, device=device),
        items_at(FAR + 8, device=device, shape=(4,), strides=(24,)),
    ):
        assert sorted(first_overlap({"a": first, "b": other})) == ["a", "b"]
    columns = {
        "left": items_at(FAR, device=device, shape=(4, 3)),
        "right": items_at(FAR + 12, device=device, shape=(4, 3)),
        "next": items_at(FAR + 96, device=device),
        "empty": items_at(FAR + 4, device=device, shape=(0, 6)),
    }
    assert first_overlap(columns) is None


def test_the_same_address_is_other_memory_on_another_device():
    buffers = {str(device): items_at(FAR, device=device) for device in (None, 0, 1)}
    assert first_overlap(buffers) is None
    assert first_overlap({**buffers, "more": items_at(FAR + 4, device=1)}) == ("1", "more")


def test_page_memory_starts_on_a_page():
    assert page_memory(10).ctypes.data % 4096 == 0
    assert len(page_memory(0)) == 0


def test_staging_lends_the_same_block_again():
    staging = Staging(shelf_bytes=1 << 20)
    with staging.lend(1000) as first:
        address = first.ctypes.data
        assert len(first) == 1000
    with staging.lend(900) as second:
        assert second.ctypes.data == address
        assert len(second) == 900


def test_staging_never_lends_one_block_to_two():
    staging = Staging(shelf_bytes=1 << 20)
    seen, lock = [], threading.Lock()
    gate = threading.Barrier(4)

    def borrow():
        for _ in range(50):
            with staging.lend(4096) as block:
                with lock:
                    assert block.ctypes.data not in seen
                    seen.append(block.ctypes.data)
                block[:] = threading.get_ident() % 251
                gate.wait(LIMIT)
                assert (block == threading.get_ident() % 251).all()
                with lock:
                    seen.remove(block.ctypes.data)

    threads = [threading.Thread(target=borrow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    assert not seen


def test_the_shelf_keeps_no_more_than_it_may():
    allocated = []

    def allocate(nbytes):
        allocated.append(nbytes)
        return page_memory(nbytes)

    staging = Staging(shelf_bytes=5000, allocate=allocate)
    for _ in range(3):
        with staging.lend(4000), staging.lend(4000):
            pass
    assert len(allocated) == 4  # the first round two, later rounds one: one stays on the shelf


def test_a_block_far_too_large_is_not_lent_for_a_small_want():
    staging = Staging(shelf_bytes=1 << 20)
    with staging.lend(100_000) as large:
        address = large.ctypes.data
    with staging.lend(1000) as small:
        assert small.ctypes.data != address


def test_the_collector_comes_back_after_nested_pauses_and_errors():
    assert gc.isenabled()
    with pytest.raises(KeyError), collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_that_pause_at_once_leave_it_on():
    gate = threading.Barrier(4)

    def pause():
        for _ in range(200):
            gate.wait(LIMIT)
            with collector_paused():
                assert not gc.isenabled()

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads)
    assert gc.isenabled()
