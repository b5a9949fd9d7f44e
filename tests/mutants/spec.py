"""Faults in spec/ and plans/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a box that ends outside of another counts as inside",
        "spec/box.py",
        """\
        return all(map(int.__le__, self.offset, other.offset)) and all(
            map(int.__ge__, self.end, other.end)
        )
""",
        """\
        return all(map(int.__le__, self.offset, other.offset))
""",
        "tests/spec/test_box.py tests/spec/test_manifest.py",
    ),
    Mutant(
        "of boxes side by side the one that reaches into the next is not compared with it",
        "spec/box.py",
        "first = max(bisect_left(live, (box.offset[side], -1)) - 1, 0)",
        "first = bisect_left(live, (box.offset[side], -1))",
        "tests/spec/test_box.py",
    ),
    Mutant(
        "a manifest may lack elements of a tensor",
        "spec/manifest.py",
        "        if held != wanted:\n",
        "        if held > wanted:\n",
        "tests/spec/test_manifest.py tests/verbs/test_agree.py",
    ),
    Mutant(
        "ranks that hold the same key heads are not neighbours",
        "spec/layout.py",
        "(place[axis] * num_pieces // self._axes[axis])",
        "(place[axis] % num_pieces)",
        "tests/spec/test_layout.py tests/spec/test_model_layout.py",
    ),
    Mutant(
        "the first layer of a pipeline stage goes to the stage before",
        "spec/rules.py",
        "bisect_right(self.starts, number) - 1",
        "max(bisect_right(self.starts, number - 1) - 1, 0)",
        "tests/spec/test_model_layout.py",
    ),
    Mutant(
        "grouped heads of every rank are those of the first",
        "spec/model_layout.py",
        "offset[rule.join] += group * length",
        "offset[rule.join] = group * length",
        "tests/spec/test_model_layout.py",
    ),
    Mutant(
        "tensors that sources cut in two ways count as cut alike if their signatures meet",
        "plans/copy_table.py",
        "is_alike = _is_alike(sources, held) & _is_alike(sinks, taken)",
        "is_alike = _is_alike(sinks, taken)",
        "tests/plans/test_copy_table.py",
    ),
    Mutant(
        "a plan may leave a hole in a sink's box",
        "plans/reshard.py",
        "if covered != sink.box.num_elements:",
        "if covered > sink.box.num_elements:",
        "tests/plans/test_reshard.py",
    ),
    Mutant(
        "names that different ranks hold become one tensor if one rank ties them",
        "plans/shares.py",
        "if is_own and holders[name] == holders[target]:",
        "if is_own:",
        "tests/plans/test_shares.py tests/plans/test_merged_source.py",
    ),
]
