"""Faults in adapters/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a transposed view of the same square counts as the same tensor",
        "adapters/tensor.py",
        "return (place, memory.address, memory.shape, memory.strides, self.spec.dtype.name)",
        "return (place, memory.address, memory.shape, self.spec.dtype.name)",
        "tests/adapters/test_numpy_dict.py tests/adapters/test_torch_module.py",
    ),
    Mutant(
        "an array that moved in memory is still the same",
        "adapters/identity.py",
        "            and all(memory_of(leaf) == memory for memory_of, leaf, memory in self._others)\n",
        "",
        "tests/adapters/test_identity.py tests/live/test_models.py",
    ),
    Mutant(
        "a release also frees the neighbours on a tensor's first and last page",
        "adapters/memory_release.py",
        "start, end = -(-start // page) * page, end // page * page",
        "start, end = start // page * page, -(-end // page) * page",
        "tests/adapters/test_memory_release.py tests/lifecycle/test_weights.py",
    ),
    Mutant(
        "the last rows of an uneven cut belong to nobody",
        "adapters/sharded.py",
        "    size = -(-total // pieces)\n",
        "    size = total // pieces\n",
        "tests/adapters/test_sharded_ranks.py",
    ),
    Mutant(
        "FSDP over tensor parallelism cuts first, not last",
        "adapters/torch_module.py",
        "cut_blocks(shape, cuts + after)",
        "cut_blocks(shape, after + cuts)",
        "tests/adapters/test_sharded_ranks.py",
    ),
    Mutant(
        "two axes of Paddle cut a dim in the order of the mesh",
        "adapters/paddle_layer.py",
        "[cut for _, cut in sorted(cuts, key=lambda each: each[0])]",
        "[cut for _, cut in cuts]",
        "tests/adapters/test_sharded_ranks_paddle.py",
    ),
    Mutant(
        "a lazily negated tensor is read with the wrong sign",
        "adapters/torch_module.py",
        "    if tensor.is_conj() or tensor.is_neg():\n",
        "    if tensor.is_conj():\n",
        "tests/adapters/test_torch_module.py",
    ),
    Mutant(
        "the memory of a torch tensor is freed under our address once its data is replaced",
        "adapters/torch_module.py",
        "owner, number = tensor.detach(), None if device is None else tensor.get_device()",
        "owner, number = tensor, None if device is None else tensor.get_device()",
        "tests/adapters/test_torch_module.py",
    ),
    Mutant(
        "arrays of the other byte order are taken as they are",
        "adapters/numpy_dict.py",
        'if dtype is None or leaf.dtype.byteorder == ">":',
        "if dtype is None:",
        "tests/adapters/test_numpy_dict.py",
    ),
]
