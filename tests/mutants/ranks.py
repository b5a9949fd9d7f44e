"""Faults in ranks/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a rank that fails does not tell the others why",
        "ranks/group.py",
        "        self._send_all(fault_frame(fault))\n",
        "",
        "tests/ranks/test_group.py tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a coordinator waits for ever for a rank that is silent",
        "ranks/group.py",
        "            if overdue and was_overdue:\n",
        "            if overdue and was_overdue and not self.is_coordinator:\n",
        "tests/ranks/test_group.py tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a coordinator takes its own message for that of rank 0",
        "ranks/group.py",
        "        return [found[rank] for rank in range(self.num_ranks)]\n",
        "        return [message, *(found[peer] for peer in sorted(self._connections))]\n",
        "tests/ranks/test_group.py",
    ),
    Mutant(
        "a stranger without the token takes the place of a rank",
        "ranks/rendezvous.py",
        "        has_token = hmac.compare_digest(hello[:64], self._token.encode())\n",
        "        has_token = len(hello) == _HELLO_BYTES\n",
        "tests/ranks/test_group.py",
    ),
    Mutant(
        "the error of a rank other than 0 is not raised on the others",
        "ranks/agreement.py",
        '        if each["error"]:\n',
        '        if each["error"] and rank == 0:\n',
        "tests/lifecycle/test_operations_by_ranks.py tests/ranks/test_agreement.py",
    ),
    Mutant(
        "a rank obeys its own verdict though another one was stored first",
        "ranks/decision.py",
        "            return self._decided(name, question, error)\n",
        "            self._decided(name, question, error)\n            return proposal\n",
        "tests/ranks/test_decision.py",
    ),
    Mutant(
        "verdicts are removed while another rank can still ask for them",
        "ranks/decision.py",
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "",
        "tests/ranks/test_decision.py",
    ),
    Mutant(
        "a text that a killed rank did not finish is read as whole",
        "ranks/file_store.py",
        "        return text.decode() if digest == _digest(text) else None\n",
        "        return text.decode() if digest else None\n",
        "tests/ranks/test_file_store.py",
    ),
]
