"""Faults in verbs/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a tensor that one of several ranks does not use is refused",
        "verbs/match.py",
        'all(each[n] == "-" for each in answers)',
        'any(each[n] == "-" for each in answers)',
        "tests/flows/test_save_and_load_by_ranks.py",
    ),
    Mutant(
        "tied tensors are filled although their names differ at rest",
        "verbs/match.py",
        "        if not same_bytes(stored, first, stored, other):\n",
        "        if not first:\n",
        "tests/adapters/test_torch_module.py",
    ),
    Mutant(
        "ranks load together what each of them opened, if it is not the same too",
        "verbs/load.py",
        "if not isinstance(theirs, list) or theirs[1:] != ours[1:]:",
        "if not isinstance(theirs, list):",
        "tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a rank's load is over before the others have their weights",
        "verbs/load.py",
        """\
        group.gather("loaded", None)
        group.broadcast("loaded", None)
""",
        """\
        group.tick()
""",
        "tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a rank's files are committed before they are durable",
        "verbs/commit.py",
        "        draft.flush()\n        draft.is_handed_over",
        "        draft.is_handed_over",
        "tests/flows/test_power_cut.py",
    ),
    Mutant(
        "a version is committed of which a rank wrote nothing",
        "verbs/commit.py",
        "        check_coverage(whole)\n",
        "",
        "tests/verbs/test_agree.py",
    ),
    Mutant(
        "a version older than the newest may be saved",
        "verbs/commit.py",
        "    if newest is not None and version <= newest:\n",
        "    if version in committed:\n",
        "tests/verbs/test_save.py",
    ),
    Mutant(
        "a prune of damaged versions removes those that it merely may not read",
        "verbs/find.py",
        """\
                if not isinstance(error, StoreError):
                    wrong.append(version)
""",
        """\
                wrong.append(version)
""",
        "tests/verbs/test_find.py",
    ),
    Mutant(
        "a process that ends does not wait for its save in the background",
        "verbs/background.py",
        'getattr(threading, "_register_atexit", atexit.register)(wait_for_background)\n',
        "",
        "tests/verbs/test_background.py",
    ),
    Mutant(
        "replicas are not compared with what was written",
        "verbs/check_replicas.py",
        "    for rank, manifest in enumerate(written):\n",
        "    for rank, manifest in enumerate(written[:0]):\n",
        "tests/verbs/test_agree.py tests/verbs/test_check_replicas.py",
    ),
    Mutant(
        "the staging that a plan shows is that of the rank that takes least",
        "verbs/plan.py",
        "        return max(self.sink_bytes, default=0)\n",
        "        return min(self.sink_bytes, default=0)\n",
        "tests/verbs/test_plan.py",
    ),
]
