"""Faults in stores/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a commit does not sync the directory that has the new name",
        "stores/draft.py",
        "            self._appear()\n            _sync_directory(self._parent)\n",
        "            self._appear()\n",
        "tests/flows/test_power_cut.py",
    ),
    Mutant(
        "the names of a version's files are not synced before the commit",
        "stores/draft.py",
        "            os.fsync(self._work_fd)\n",
        "",
        "tests/flows/test_power_cut.py",
    ),
    Mutant(
        "new legacy files may be on the disk before the old ones are gone from it",
        "stores/draft.py",
        "            _sync_directory(self._place)\n            for name in self._files:\n",
        "            for name in self._files:\n",
        "tests/flows/test_power_cut.py",
    ),
    Mutant(
        "a sweep does not look whether a draft's writer lives",
        "stores/draft.py",
        """\
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
""",
        """\
                shutil.rmtree(path)
""",
        "tests/stores/test_local_draft.py",
    ),
    Mutant(
        "writers of legacy files do not take turns",
        "stores/draft.py",
        "                _lock_directory(fd)\n                break\n",
        "                break\n",
        "tests/stores/test_legacy_draft.py",
    ),
    Mutant(
        "a second write past the page cache lands on the first",
        "stores/draft_file.py",
        "_write_all(fd, offset + start, bounce[: len(some)])",
        "_write_all(fd, offset, bounce[: len(some)])",
        "tests/stores/test_local_draft.py",
    ),
    Mutant(
        "a file that another one has replaced counts as the one that was opened",
        "stores/local.py",
        "            return os.path.samestat(os.fstat(self.fd), os.stat(self.path))\n",
        "            return os.path.exists(self.path)\n",
        "tests/stores/test_local.py",
    ),
    Mutant(
        "a token file that other users can read is taken",
        "stores/private_file.py",
        "    if whose := exposure(found):\n",
        "    if whose := exposure(found, bits=0):\n",
        "tests/cli/test_tokens.py tests/server/test_tokens_and_proofs.py",
    ),
]
