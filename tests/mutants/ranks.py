"""Faults in ranks/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a rank that fails does not tell the others why",
        "ranks/group.py",
        "            self._tell(Refused(type(self._fault).__name__, str(self._fault)))\n",
        "            pass\n",
        "tests/ranks/test_group.py tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a coordinator waits for ever for a rank that is silent",
        "ranks/group.py",
        "            if not self._hear_next(until) and until == end <= monotonic():\n",
        "            is_late = until == end <= monotonic() and not self.is_coordinator\n"
        "            if not self._hear_next(until) and is_late:\n",
        "tests/ranks/test_group.py tests/flows/test_failing_ranks.py",
    ),
    Mutant(
        "a coordinator takes its own message for that of rank 0",
        "ranks/group.py",
        "        return [mine if rank == self.rank else heard[rank] for rank in range(self.num_ranks)]\n",
        "        return [mine, *(heard[peer] for peer in sorted(heard))]\n",
        "tests/ranks/test_group.py",
    ),
    Mutant(
        "who can read the store takes the place of a rank of a group with a secret",
        "ranks/rendezvous.py",
        '        return hmac.digest(self._rendezvous.token.encode(), secret.encode(), "sha256").hex()\n',
        '        return hmac.digest(b"", secret.encode(), "sha256").hex()\n',
        "tests/ranks",
    ),
    Mutant(
        "the error of a rank other than 0 is not raised on the others",
        "ranks/agreement.py",
        '        if each["error"]:\n',
        '        if each["error"] and rank == 0:\n',
        "tests/lifecycle/test_operations_by_ranks.py tests/ranks/test_agreement.py",
    ),
    Mutant(
        "an answer of an earlier step is taken for one of this step",
        "ranks/group.py",
        "            if number != self._number or (deadline is None and step != self._step):\n",
        "            if deadline is None and step != self._step:\n",
        "tests/ranks/test_steps.py tests/ranks/test_two_steps.py tests/ranks/test_group.py",
    ),
    Mutant(
        "ranks that are asked for different things go on",
        "ranks/agreement.py",
        "        _raise_mixed(said)\n        return [{name: each",
        "        return [{name: each",
        "tests/ranks/test_steps.py",
    ),
    Mutant(
        "ranks of a trainer on other hosts are sent to this host's loopback",
        "live/publisher.py",
        "            self._ranks = Ranks(replace(rendezvous, token=secret, host=host_facing(place)))\n",
        "            self._ranks = Ranks(replace(rendezvous, token=secret))\n",
        "tests/live/test_across_hosts.py",
    ),
    Mutant(
        "a rank that was started again shows the token of the trainer before",
        "live/front_store.py",
        "            self._channel, self._token = channel, me.token\n",
        "            self._channel, self._me, self._token = channel, me, me.token\n",
        "tests/transports/test_address.py",
    ),
    Mutant(
        "two processes may be the same rank",
        "ranks/rendezvous.py",
        '                if self._get("arrival", rank) == arrival:\n',
        '                if self._get("arrival", rank):\n',
        "tests/ranks/test_group.py",
    ),
    Mutant(
        "a rank that was lost is waited for in the next step of the same operation",
        "ranks/agreement.py",
        "            group.wait_for_fault(0)\n            try:\n                work()\n",
        "            try:\n                work()\n",
        "tests/ranks/test_steps.py tests/ranks/test_two_steps.py tests/live/test_ranks.py",
    ),
]
