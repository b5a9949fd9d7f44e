"""What every writable format promises. A new one joins by adding a line to FORMATS."""

import os
from dataclasses import replace

import numpy as np
import pytest

import flyweight as fw
from conftest import odd_arrays, same, zeros_like
from fakes import MemoryDraft, MemoryStore
from flyweight.adapters.model import adapt
from flyweight.errors import FlyweightError
from flyweight.formats.huggingface import huggingface_format, open_huggingface
from flyweight.formats.legacy import legacy_format
from flyweight.formats.paddle_dist import PADDLE_FORMAT, open_paddle
from flyweight.formats.pdparams import open_pdparams
from flyweight.formats.snapshot import open_snapshot, snapshot_format
from flyweight.formats.torch_dcp import DCP_FORMAT, open_dcp
from flyweight.formats.writer import seal, write
from flyweight.stores.draft import LocalDraft

FORMATS = {
    "snapshot": lambda: snapshot_format(),
    "snapshot, parts": lambda: snapshot_format(100),
    "huggingface": lambda: huggingface_format(),
    "huggingface, parts": lambda: huggingface_format(100),
    "pickle": lambda: legacy(None, False),
    "pickle, parts": lambda: legacy(100, False),
    "safetensors in pdparams": lambda: legacy(None, True),
    "dcp": lambda: DCP_FORMAT,
    "paddle": lambda: PADDLE_FORMAT,
}
OPENERS = {
    "snapshot": open_snapshot,
    "huggingface": open_huggingface,
    "pdparams": lambda store: open_pdparams(store, store.names()),
    "dcp": open_dcp,
    "paddle": open_paddle,
}


def legacy(part_bytes, as_safetensors):
    return legacy_format(rank=1, legacy_id=2, part_bytes=part_bytes, as_safetensors=as_safetensors)


def arrays():
    return odd_arrays()


def write_all(format, draft):
    """Write the arrays to a draft, commit it, and return their manifest with extents."""
    source = adapt(arrays())
    manifest = replace(source.manifest, version=3)
    with draft:
        whole, plans = write(source, manifest, format, draft, num_threads=2, memory_bytes=64 << 20)
        seal(whole, plans, format, draft)
        draft.commit()
    return whole


@pytest.fixture(params=FORMATS)
def written(request, tmp_path):
    """Files of a format in a directory, and how to open them."""
    format = FORMATS[request.param]()
    whole = write_all(format, LocalDraft(tmp_path / "out"))
    ids = {"rank": 1, "legacy_id": 2} if format.name == "pdparams" else {}
    return tmp_path / "out", whole, format, ids


def test_what_was_written_is_read_back(written):
    place, _, _, ids = written
    target = zeros_like(arrays())
    fw.load(place, into=target, **ids)
    assert same(target, arrays())


@pytest.mark.parametrize("name", FORMATS)
def test_a_third_partys_draft_and_store_hold_the_same_files(name, tmp_path):
    format, files = FORMATS[name](), {}
    write_all(format, MemoryDraft(files))
    write_all(format, LocalDraft(tmp_path / "out"))
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    target = zeros_like(arrays())
    fw.load(OPENERS[format.name](MemoryStore(files)), into=target)
    assert same(target, arrays())


def test_the_layout_accounts_for_every_byte_of_every_file(written):
    place, whole, format, _ = written
    for plan in format.layout(whole):
        spans = [(offset, offset + len(text)) for offset, text in plan.literals]
        spans += [(e.offset, e.offset + whole.tensors[e.name].nbytes) for e in plan.extents]
        at = 0
        for start, end in sorted(spans):
            assert start == at
            at = end
        assert at == plan.nbytes == (place / plan.name).stat().st_size


def test_boxes_of_every_tensor_are_read_back(written):
    place, _, _, ids = written
    with fw.open(place, **ids) as source:
        for name, array in arrays().items():
            offset = tuple(size // 3 for size in array.shape)
            shape = tuple(size - at for size, at in zip(array.shape, offset, strict=True))
            box = fw.Box(offset, shape)
            expected = array[tuple(slice(at, None) for at in offset)].tobytes()
            assert source.read(name, box).tobytes() == expected


def test_laying_out_is_pure(written):
    _, whole, format, _ = written
    assert format.layout(whole) == format.layout(whole)
    plans = format.layout(whole)
    assert format.seal(whole, plans) == format.seal(whole, plans)


def test_any_file_cut_anywhere_is_refused_and_nothing_is_written(written):
    place, _, format, ids = written
    for path in sorted(place.iterdir()):
        if format.name == "snapshot" and path.name == "model.safetensors.index.json":
            continue  # for other people's tools; ours has its manifest, and verify compares them
        content = path.read_bytes()
        for length in {0, 1, 7, 9, len(content) // 2, len(content) - 1}:
            os.truncate(path, length)
            target = {name: np.ones_like(array) for name, array in arrays().items()}
            with pytest.raises(FlyweightError):
                fw.load(place, into=target, **ids)
            assert all((array == 1).all() for array in target.values())
            path.write_bytes(content)
    fw.load(place, into=zeros_like(arrays()), **ids)
