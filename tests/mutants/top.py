"""Faults in the files beside the rooms, and in those of cuda/ that need no device."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "an empty tensor has another digest among small ones than alone",
        "digest.py",
        "terms = np.where(nbytes == 0, np.uint64(0), _terms(np.zeros(len(sums), np.uint64), sums))",
        "terms = _terms(np.zeros(len(sums), np.uint64), sums)",
        "tests/test_digest.py",
    ),
    Mutant(
        "a tensor that others start in is not looked at for overlaps",
        "memory_table.py",
        "            found[rows[:-1]] |= low[rows[1:]] < high[rows[:-1]]\n",
        "",
        "tests/test_memory.py tests/adapters/test_torch_module.py",
    ),
    Mutant(
        "a proof does not cover the last of what it is a proof of",
        "proofs.py",
        r'text = "\n".join(words).encode',
        r'text = "\n".join(words[:-1]).encode',
        "tests/server/test_tokens_and_proofs.py",
    ),
    Mutant(
        "a wait of NaN seconds is accepted",
        "checks.py",
        "    if not 0 <= seconds <= _MAX_SECONDS:\n",
        "    if seconds < 0 or seconds > _MAX_SECONDS:\n",
        "tests/test_checks.py",
    ),
    Mutant(
        "the kernel copies from addresses that are not aligned",
        "cuda/copy_tasks.py",
        "((sink.address | source.address) & 15) == 0",
        "(sink.address & 15) == 0",
        "tests/cuda/test_copy_tasks.py::test_the_kernel_copies_small_aligned_blocks",
    ),
    Mutant(
        "the last rows of a tensor are digested as its first",
        "cuda/digest_kernel.py",
        "first_row + whole // ROW_BYTES, index)",
        "first_row, index)",
        "tests/cuda/test_digest_tasks.py",
    ),
]
