"""Faults in lifecycle/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a damaged record of a status cell is taken for a whole one",
        "lifecycle/cell.py",
        "            is_whole = len(body) == length and crc == _crc(number, body)\n",
        "            is_whole = len(body) == length\n",
        "tests/lifecycle/test_cell_records.py tests/lifecycle/test_cell.py",
    ),
    Mutant(
        "a status cell shows a record before it is written",
        "lifecycle/cell.py",
        "        self._memory[start : start + len(data)] = data\n        self._words[0] = count\n",
        "        self._words[0] = count\n        self._memory[start : start + len(data)] = data\n",
        "tests/lifecycle/test_cell_records.py",
    ),
    Mutant(
        "an engine whose process was killed counts as serving",
        "lifecycle/cell.py",
        "record.is_listening and is_life_running(self._file, record.started)",
        "record.is_listening",
        "tests/lifecycle/test_liveness.py tests/lifecycle/test_worker.py",
    ),
    Mutant(
        "the status cell of a running engine is replaced",
        "lifecycle/cell_file.py",
        "                if locked(file, 0, 0):\n",
        "                if locked(file, 0, 0) or monotonic() > deadline:\n",
        "tests/lifecycle/test_cell.py",
    ),
    Mutant(
        "a pause ends while the last request still runs",
        "lifecycle/engine.py",
        "self._changed.wait_for(lambda: not self._num_running, seconds)",
        "self._changed.wait_for(lambda: self._num_running <= 1, seconds)",
        "tests/contracts/test_engine.py tests/lifecycle/test_requests.py",
    ),
    Mutant(
        "an engine serves a version whose memory was released since",
        "lifecycle/engine_steps.py",
        '            self._weights.forget("the memory of its weights was released")\n',
        "",
        "tests/lifecycle/test_operations.py tests/lifecycle/test_worker.py",
    ),
    Mutant(
        "an update keeps the cache that was computed with the old weights",
        "lifecycle/update.py",
        "        self.steps.drop_cache()\n",
        "",
        "tests/lifecycle/test_operations.py tests/lifecycle/test_operations_and_requests.py",
    ),
    Mutant(
        "an engine that served goes on with half-written weights after an update that failed",
        "lifecycle/update.py",
        "(steps.version is not None or steps.is_in_pieces):\n",
        "steps.version is None:\n",
        "tests/lifecycle/test_operations.py tests/lifecycle/test_worker.py",
    ),
    Mutant(
        "a version that arrives after its request has failed is loaded all the same",
        "lifecycle/update.py",
        "        elif monotonic() > self.deadline:",
        "        elif self.deadline < 0:",
        "tests/lifecycle/test_update_requests.py",
    ),
    Mutant(
        "a rank that does not know whether the others write from files keeps its version",
        "lifecycle/load_together.py",
        "            self._forget(lost)\n            raise\n        raise_first(said, error)\n        self",
        "            raise\n        raise_first(said, error)\n        self",
        "tests/lifecycle/test_ranks_model.py tests/lifecycle/test_commit_by_ranks.py",
    ),
    Mutant(
        "a rank begins what was requested though the request's deadline has passed",
        "lifecycle/worker.py",
        "    left = min(request.deadline - monotonic(), request.timeout_seconds)\n",
        "    left = request.timeout_seconds\n",
        "tests/lifecycle/test_worker.py::test_a_stopped_engine_does_not_hold_its_controller_for_ever",
    ),
    Mutant(
        "an engine that a user paused serves again once it is restarted",
        "lifecycle/worker.py",
        "                should_serve=should_serve and not (last and last.is_paused_by_hand),\n",
        "                should_serve=should_serve,\n",
        "tests/lifecycle/test_worker.py",
    ),
]
