"""Faults in transports/."""

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a server of files takes any token",
        "transports/fd_passing.py",
        "if not secrets.compare_digest(token.encode(), self._token.encode()):",
        "if not token:",
        "tests/transports/test_fd_passing.py",
    ),
    Mutant(
        "a server of files gives them to a connection that has sent no token",
        "transports/fd_passing.py",
        "case Wanted(key) if self._connections[peer] is not None:",
        "case Wanted(key):",
        "tests/transports/test_fd_passing.py",
    ),
    Mutant(
        "an answer that came too late is taken for the file that is asked for next",
        "transports/fd_passing.py",
        "                # A late answer would be taken for the answer to the next message.\n"
        "                self._socket.close()\n",
        "",
        "tests/transports/test_fd_passing.py",
    ),
    Mutant(
        "readers of shared memory can write to it",
        "transports/shared_memory.py",
        "            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)\n",
        "",
        "tests/transports/test_shared_memory.py",
    ),
    Mutant(
        "a handle that reaches beyond its shared memory opens fewer bytes than it names",
        "transports/shared_memory.py",
        "            if end > len(data):\n",
        "            if handle.offset > len(data):\n",
        "tests/contracts/test_transport.py tests/transports/test_shared_memory.py",
    ),
    Mutant(
        "a recorded proof opens a data connection again",
        "transports/data_protocol.py",
        '"data client", greeting.nonce, nonce, greeting.line, kind)',
        '"data client", greeting.nonce, greeting.nonce, greeting.line, kind)',
        "tests/transports/test_data_sockets.py",
    ),
    Mutant(
        "a reader takes a data server that does not prove the token",
        "transports/data_protocol.py",
        "if is_same(shown, _server_proof(token, greeting, challenge.nonce, welcome)):",
        "if len(shown) == 64:",
        "tests/transports/test_data_sockets.py",
    ),
    Mutant(
        "two rows with gaps are sent from one buffer, so the second one is sent twice",
        "transports/tcp.py",
        "                    num_packed += 1\n",
        "",
        "tests/transports/test_tcp.py tests/transports/test_network.py",
    ),
    Mutant(
        "memory is still sent after its release, with what it has next",
        "transports/data_sockets.py",
        "                for peer in offer.readers:\n"
        "                    shut_down(peer)  # from here on the kernel takes nothing more from the memory\n",
        "",
        "tests/transports/test_data_sockets.py",
    ),
    Mutant(
        "a connection whose read failed is read from again",
        "transports/data_sockets.py",
        "                    self._is_closed |= not is_complete\n",
        "",
        "tests/transports/test_data_sockets.py tests/transports/test_network.py",
    ),
]
