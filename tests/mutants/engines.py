"""Faults in engines/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "FastDeploy serves parameters that were replaced after they were filled",
        "engines/strategies.py",
        "        return self.version is not None and self._models.are_unchanged()\n",
        "        return self.version is not None\n",
        "tests/engines/test_fastdeploy_replaced_parameters.py",
    ),
    Mutant(
        "the result of an old request overwrites a request that came meanwhile",
        "engines/legacy_cells.py",
        "    if status_of(cell) in {*REQUESTS} - {of}:\n",
        "    if status_of(cell) in {*REQUESTS} - {of, LegacyStatus.CLEARING}:\n",
        "tests/engines/test_legacy_cells.py",
    ),
    Mutant(
        "a rank of FastDeploy takes the failed update of the first rank for a success",
        "engines/worker_loop.py",
        "    if request is LegacyStatus.UPDATING and result is LegacyStatus.CLEARED:\n",
        "    if request is LegacyStatus.UPDATING and result not in LegacyStatus:\n",
        "tests/engines/test_legacy_cells.py",
    ),
    Mutant(
        "the second of two steps in version.yaml decides which version is loaded",
        "engines/fastdeploy_config.py",
        "    if len(nodes) != 1:  # PyYAML would take the last of two\n",
        "    if not nodes:\n",
        "tests/engines/test_fastdeploy_versions.py",
    ),
    Mutant(
        "weights are written into a vLLM that is not paused",
        "engines/vllm_engine.py",
        "        if not self._control.is_paused(min(deadline, monotonic() + CALL_SECONDS)):\n",
        "        if deadline < monotonic() - CALL_SECONDS:\n",
        "tests/engines/test_vllm_engine.py::test_an_engine_that_is_not_paused_is_not_updated",
    ),
    Mutant(
        "a vLLM that another controller has left half-written is resumed",
        "engines/vllm_engine.py",
        "            if not self._workers.are_whole:\n",
        "            if self._workers.are_lost:\n",
        "tests/engines/test_vllm_engine.py::test_what_another_controller_has_left_is_not_resumed",
    ),
    Mutant(
        "the restart of a vLLM worker is not noticed",
        "engines/vllm_workers.py",
        "        if (boots := self._boots_now()) != self._boots:\n",
        "        if len(boots := self._boots_now()) != len(self._boots):\n",
        "tests/engines/test_vllm_engine.py::test_a_restart_is_noticed_before_and_during_an_update",
    ),
    Mutant(
        "vLLM is named a version that one of its workers has not loaded",
        "engines/vllm_workers.py",
        '            raise VersionError(f"workers of vLLM ended an update to {version} with {wrong[0]}")\n'
        "        self._control.finish(str(version), deadline)\n",
        "            self.look()\n        self._control.finish(str(version), deadline)\n",
        "tests/engines/test_vllm_engine.py::test_a_worker_that_ends_with_something_else_fails_the_engine",
    ),
    Mutant(
        "the workers of a vLLM load different versions",
        "engines/vllm_workers.py",
        "                if len(versions) > 1:\n",
        "                if not versions:\n",
        "tests/engines/test_vllm_engine.py::test_workers_that_stage_different_versions_are_refused",
    ),
]
