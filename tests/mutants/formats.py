"""Faults in formats/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a large chunk that is read in place is not checked",
        "formats/reader.py",
        "                self._is_right(chunk, running.intdigest())\n",
        "                running.intdigest()\n",
        "tests/formats/test_reader.py tests/verbs/test_load.py",
    ),
    Mutant(
        "tensors are read in place as if nothing lay between them",
        "formats/reader.py",
        "if chunk.goal is None or chunk.offset != at:",
        "if chunk.goal is None:",
        "tests/formats/test_reader.py tests/formats/test_pdparams.py",
    ),
    Mutant(
        "the head of a part is not compared with its checksum",
        "formats/snapshot.py",
        "        if found != part.head_checksum:\n",
        "        if not found:\n",
        "tests/formats/test_snapshot.py",
    ),
    Mutant(
        "a renamed directory passes for another version",
        "formats/snapshot.py",
        "    if version is not None and manifest.version != version:\n",
        "    if version is not None and manifest.version is None:\n",
        "tests/formats/test_snapshot.py",
    ),
    Mutant(
        "legacy parts whose first ones are gone are complete",
        "formats/legacy.py",
        "range(min(first, 1), last)",
        "range(first, last)",
        "tests/formats/test_pdparams.py",
    ),
    Mutant(
        "a flat shard in several slices has each slice where the first one starts",
        "formats/paddle_dist.py",
        "at, start = extent.offset, shard.flat[0] + extent.box.offset[0]",
        "at, start = extent.offset, shard.flat[0]",
        "tests/formats/test_paddle_dist.py",
    ),
    Mutant(
        "the dtype of torch's metadata is believed, whatever the data file says",
        "formats/torch_dcp.py",
        "if dtype != spec.dtype or items.shape != held.shape:",
        "if items.shape != held.shape:",
        "tests/formats/test_torch_dcp.py",
    ),
    Mutant(
        "an array in column order is read as one in row order",
        "formats/pdparams.py",
        "if is_fortran and sum(size > 1 for size in shape) > 1:",
        "if is_fortran and 0 in shape:",
        "tests/formats/test_paddle_dist.py tests/formats/test_pdparams.py",
    ),
    Mutant(
        "small tensors are written as neighbours also where something lies between them",
        "formats/writer.py",
        "is_neighbour = batch and batch[-1].offset + batch[-1].nbytes == chunk.offset",
        "is_neighbour = bool(batch)",
        "tests/contracts/test_format.py tests/formats/test_pdparams.py",
    ),
    Mutant(
        "a tensor in several files is the same if its first piece is",
        "formats/stored.py",
        "return stored.manifest.extents[shards[0].rank].digest if len(shards) == 1 else None",
        "return stored.manifest.extents[shards[0].rank].digest",
        "tests/verbs/test_compare.py tests/flows/test_save_and_load_by_layout.py",
    ),
]
