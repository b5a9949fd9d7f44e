"""Faults in server/ and cli/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the control server takes any token",
        "server/access.py",
        '        if scheme.lower() == "bearer" and is_same(shown.strip(), self._token):\n',
        '        if scheme.lower() == "bearer" and shown.strip():\n',
        "tests/server/test_tokens_and_proofs.py tests/server/test_refused_requests.py",
    ),
    Mutant(
        "a proof that somebody has recorded is good for a second request",
        "server/access.py",
        "        del self._nonces[nonce]\n",
        "",
        "tests/server/test_tokens_and_proofs.py",
    ),
    Mutant(
        "a page of another site in the user's browser can control engines",
        "server/access.py",
        '        if origin not in (None, f"http://{host}"):\n',
        '        if origin == "null":\n',
        "tests/server/test_refused_requests.py",
    ),
    Mutant(
        "a request to all replicas begins on some of them while another one is busy",
        "server/fleet.py",
        "            if busy:\n",
        "            if len(busy) == len(controls):\n",
        "tests/server/test_fleet.py",
    ),
    Mutant(
        "a request that must not wait for running requests drains them",
        "server/requests.py",
        '            may_drain=one_of(WhenServing, self.when_serving, "when_serving") is WhenServing.DRAIN,\n',
        '            may_drain=one_of(WhenServing, self.when_serving, "when_serving") in WhenServing,\n',
        "tests/server/test_routes.py::test_an_update_while_requests_run_drains_or_refuses_as_requested",
    ),
    Mutant(
        "a command sends its request to a stranger who does not know the token",
        "cli/client.py",
        '        if is_same(shown, proof(self._token, "server", nonce, theirs)):\n',
        "        if shown and theirs:\n",
        "tests/server/test_tokens_and_proofs.py tests/cli/test_tokens.py",
    ),
    Mutant(
        "flyweight verify ends with 0 though files are damaged",
        "cli/files.py",
        "    if not report.is_whole:\n        raise SystemExit(EXIT_NO)\n",
        "    if not report.checked_bytes:\n        raise SystemExit(EXIT_NO)\n",
        "tests/cli/test_files.py",
    ),
]
