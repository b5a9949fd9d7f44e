"""Faults in transports/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a holder takes any token",
        "transports/door.py",
        '        check_proof(proof.proof, proof_of(token, "reader", hello, nonce), self.peer)\n',
        "",
        "tests/transports/test_door.py",
    ),
    Mutant(
        "a reader takes a holder that does not prove the token",
        "transports/channel.py",
        '    check_proof(theirs.proof, proof_of(token, "holder", hello, theirs.nonce), channel.peer)\n',
        "",
        "tests/transports/test_door.py tests/live/test_strangers.py",
    ),
    Mutant(
        "a silent stranger keeps its place for ever",
        "transports/door.py",
        "                if monotonic() >= each.deadline:\n",
        "                if monotonic() >= each.deadline + 1e6:\n",
        "tests/transports/test_door.py tests/live/test_strangers.py",
    ),
    Mutant(
        "a frame that was changed or repeated on its way is taken",
        "transports/channel.py",
        "        if not hmac.compare_digest(self.next(header, body), bytes(tag)):\n",
        "        if not hmac.compare_digest(self.next(header, body)[:0], bytes(tag)[:0]):\n",
        "tests/transports/test_channel.py tests/live/test_strangers.py",
    ),
    Mutant(
        "readers of shared memory can write to it",
        "transports/segments.py",
        "                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)\n",
        "                pass\n",
        "tests/transports/test_segments.py",
    ),
    Mutant(
        "a block may end outside of its segment",
        "transports/segments.py",
        "    is_beyond = (start < below) | (start > size - above - item_bytes)\n",
        "    is_beyond = (start < below) | (start > size)\n",
        "tests/transports/test_segments.py",
    ),
    Mutant(
        "memory of another file than a sealed one is mapped",
        "transports/segments.py",
        "        check_file(file, nbytes)\n        return _mapped",
        "        return _mapped",
        "tests/transports/test_segments.py",
    ),
    Mutant(
        "a holder with an authority takes readers without a certificate",
        "transports/tls.py",
        "            found.verify_mode = ssl.CERT_REQUIRED\n",
        "            found.verify_mode = ssl.CERT_OPTIONAL\n",
        "tests/live/test_tls.py",
    ),
    Mutant(
        "a pull that was too late leaves its process alive",
        "transports/nixl.py",
        "        except BaseException:\n            self.end(process)\n            raise\n",
        "        except BaseException:\n            raise\n",
        "tests/transports/test_nixl.py",
    ),
    Mutant(
        "a holder may name more bytes than were asked for",
        "transports/nixl.py",
        "if len(peers) != 1 or nbytes != stop - start:",
        "if len(peers) != 1:",
        "tests/transports/test_nixl.py",
    ),
    Mutant(
        "a process keeps memory that was freed",
        "transports/nixl.py",
        "                weakref.finalize(segment, self.kill).atexit = False\n",
        "",
        "tests/transports/test_nixl.py",
    ),
    Mutant(
        "the slots of a reader are one",
        "transports/nixl.py",
        "        packed = slot * SLOT_BYTES\n",
        "        packed = 0\n",
        "tests/transports/test_nixl.py",
    ),
    Mutant(
        "a part that does not lie in a segment is pulled from there",
        "transports/nixl.py",
        "if each.here <= address and address + nbytes <= each.here + each.nbytes:",
        "if each.here <= address:",
        "tests/transports/test_nixl.py",
    ),
    Mutant(
        "staging that is still written is fetched into over sockets",
        "live/fetch.py",
        "            if self._must_pull or not self._puller.is_fenced:\n",
        "            if self._must_pull:\n",
        "tests/transports/test_nixl.py",
    ),
]
