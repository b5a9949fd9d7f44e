"""Who may read what was written: the umask says, as for every other writer of checkpoints."""

import os
from pathlib import Path

import pytest

import flyweight as fw
from child_processes import run_python
from rank_processes import run_ranks

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
import flyweight as fw

root = Path(sys.argv[1])
weights = {"a": np.arange(4000.0), "b": np.zeros((3, 5), np.float16)}
fw.save(weights, root / "runs" / "7", version=1, part_bytes=8000)
fw.save(weights, root / "background", version=1, background=True).wait(60)
fw.save_legacy(weights, root / "old", rank=0, legacy_id=0)
fw.save_legacy(weights, root / "old" / "parts", rank=0, legacy_id=0, part_bytes=8000)
for to in ("snapshot", "hf", "dcp", "paddle"):
    fw.convert(root / "runs" / "7", root / to, to=to)
for to in ("safetensors", "pdparams"):
    fw.convert(root / "runs" / "7", root / "files" / f"model.{to}", to=to)
"""


def modes(root):
    """The modes of all files, and those of all directories, under `root`."""
    paths = list(Path(root).rglob("*"))
    files, directories = (
        {path.stat().st_mode & 0o777 for path in paths if path.is_file() == is_file}
        for is_file in (True, False)
    )
    return files, directories


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_every_writer_follows_the_umask(tmp_path, umask):
    run_python(SCRIPT, tmp_path, check=True, timeout=120, umask=umask)
    assert modes(tmp_path) == ({0o666 & ~umask}, {0o777 & ~umask})


def save_shards(rank, num_ranks, root, umask):
    import torch
    import torch.distributed as dist

    os.umask(int(umask))
    rows = fw.Sharded(torch.full((2, 3), rank), (2 * num_ranks, 3), (2 * rank, 0))
    fw.save({"w": rows}, Path(root) / "runs" / "7", version=1, process_group=dist.group.WORLD)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_every_rank_of_a_save_follows_the_umask(tmp_path, umask):
    run_ranks(2, __file__, "save_shards", tmp_path, umask)
    assert modes(tmp_path) == ({0o666 & ~umask}, {0o777 & ~umask})
