"""RoundDecisions: the verdicts for a replica in a round, stored once, for all its ranks.

A leader that is killed between two messages would leave one rank with `commit` and another
without. So every decision is stored before it is sent, and the first proposal wins:

    leader, before the first write    "write"     rank without leader, until it hears write  "keep"
    leader, before the first commit   "commit"    rank without leader, from then on          "fail"

A rank that finds "commit" holds the new version, one that finds "keep" the old one, and any other
none: after "write" another rank may have written.

The store is a directory with one file per verdict. A decision is a hard link from the name of its
question to the file of its verdict: one system call, which fails if the name exists. So a killed
process leaves a whole decision or none, a stopped one delays nobody, and nothing waits.

The directory is of one session of the publisher. It outlives the publisher: a process that uses
it holds a shared lock, which the kernel releases, and only a process that finds no lock removes it.
A rank also locks a byte for its replica, so that the leader knows which replicas can still ask.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from flyweight.errors import PeerLost, SpecError, StoreError
from flyweight.forks import call_in_child
from flyweight.host import exposure, locked, locked_bytes, opened

Verdict = Literal["write", "keep", "commit", "fail"]
_QUESTION_OF: dict[Verdict, str] = {
    "write": "write",
    "keep": "write",
    "commit": "commit",
    "fail": "commit",
}
_SESSION = re.compile(r"[0-9a-f]{1,64}")
_PREFIX = "decisions-"
_DECISION = re.compile(r"[0-9a-f]{32}\.[0-9]+\.(write|commit)")


class RoundDecisions:
    """The decisions of one session of a publisher, opened by one of its ranks or replicas."""

    def __init__(self, directory: Path, session: str, replica: str | None = None) -> None:
        """Open the decisions of a publisher; `create` makes them. Raise PeerLost if there are none.

        directory: the publisher's private directory.
        replica: the replica that asks; None for a publisher, which begins its rounds.
        """
        self.path = _path(directory, session)
        self._rounds: dict[str, int] = {}
        """The round that each replica is in, of those that this process leads."""
        self._lock, self._locks = threading.Lock(), -1
        try:
            self._file = opened(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError as cause:
            raise PeerLost(f"{str(self.path)!r} is not there: its publisher has ended") from cause
        except OSError as cause:
            raise _error(cause, "open", self.path) from cause
        call_in_child(self._close_in_child)
        try:
            if whose := exposure(os.fstat(self._file)):
                raise SpecError(
                    f"directory {str(self.path)!r} {whose}; it has to belong to user "
                    f"{os.geteuid()} with mode 700"
                )
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._verdicts = {self._inode(each): each for each in _QUESTION_OF}
            self._locks = opened(self.path / "write", os.O_RDWR | os.O_NOFOLLOW)
            if replica is not None:
                locked(self._locks, _byte(_digest(replica)), 1, is_shared=True)
        except OSError as cause:  # another process is removing it
            self._close_file()
            raise PeerLost(f"the decisions in {str(self.path)!r} were removed") from cause
        except BaseException:
            self._close_file()
            raise

    @classmethod
    def create(cls, directory: Path, session: str) -> RoundDecisions:
        """Make the decisions of a new session, and remove those that no process uses.

        Only the publisher that has claimed `directory` calls this.
        """
        remove_unused(directory)
        path = _path(directory, session)
        try:
            path.mkdir(mode=0o700)
            path.chmod(0o700)  # whatever the umask is
            for verdict in _QUESTION_OF:
                flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                os.close(os.open(path / verdict, flags, 0o600))
        except OSError as cause:
            raise _error(cause, "create", path) from cause
        return cls(directory, session)

    def begin(self, replica: str, round_number: int) -> None:
        """Remove what was decided in the replica's last round. Only the leader calls this.

        All ranks of the replica wait for a version, so they have settled their last round. If the
        replica is new, remove what was decided for those that are gone.
        """
        with self._lock:
            self._check_open()
            last = self._rounds.get(replica)
            if last is None:
                with suppress(OSError):  # then it is tried again for the next new replica
                    self._forget_gone()
            else:
                for question in ("write", "commit"):
                    self._unlink(_name(replica, last, question))
            self._rounds[replica] = round_number

    def decide(self, replica: str, round_number: int, proposal: Verdict) -> Verdict:
        """Store a proposal if nothing is decided yet; return what is decided. Does not wait.

        A process that cannot store or read the decision gets StoreError, and must not serve.
        """
        question = _QUESTION_OF[proposal]
        name = _name(replica, round_number, question)
        with self._lock:
            self._check_open()
            try:
                os.link(proposal, name, src_dir_fd=self._file, dst_dir_fd=self._file)
                return proposal
            except OSError as cause:
                error = _error(cause, f"decide round {round_number} of {replica!r}", self.path)
            return self._decided(name, question, error)

    def close(self) -> None:
        """Stop using the decisions; the last process that does removes them. Safe to repeat.

        Settle a round first: nobody who closed can ask again.
        """
        with self._lock:
            if self._file >= 0:
                _remove(self._file, self.path)
                self._close_file()

    def _decided(self, name: str, question: str, error: StoreError) -> Verdict:
        """Return the stored verdict; raise the error if none is stored."""
        try:
            verdict = self._verdicts.get(self._inode(name))
        except OSError:
            raise error from None
        if verdict is None or _QUESTION_OF[verdict] != question:
            raise StoreError(f"{str(self.path / name)!r} is not a decision; remove it")
        return verdict

    def _inode(self, name: str) -> int:
        return os.stat(name, dir_fd=self._file, follow_symlinks=False).st_ino

    def _forget_gone(self) -> None:
        """Remove the decisions on replicas none of whose processes can ask for them any more."""
        names = [name for name in os.listdir(self._file) if _DECISION.fullmatch(name)]
        digests = {name.partition(".")[0] for name in names}
        gone = {each for each in digests if locked_bytes(self._locks, _byte(each)) is None}
        for name in names:
            if name.partition(".")[0] in gone:
                self._unlink(name)
        self._rounds = {
            name: last for name, last in self._rounds.items() if _digest(name) not in gone
        }

    def _unlink(self, name: str) -> None:
        with suppress(OSError):  # what stays is of a round that is over
            os.unlink(name, dir_fd=self._file)

    def _check_open(self) -> None:
        if self._file < 0:
            raise StoreError(f"the decisions in {str(self.path)!r} are closed")

    def _close_in_child(self) -> None:
        """Close a forked child's file; its parent keeps the lock."""
        self._lock = threading.Lock()
        self._close_file()

    def _close_file(self) -> None:
        for file in (self._file, self._locks):
            if file >= 0:
                os.close(file)
        self._file = self._locks = -1


def remove_unused(directory: Path) -> None:
    """Remove the decisions of all sessions in a directory that no process uses any more."""
    for path in directory.glob(f"{_PREFIX}*"):
        if not _SESSION.fullmatch(path.name.removeprefix(_PREFIX)):
            continue
        try:
            file = opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or not made by a publisher
        try:
            if not exposure(os.fstat(file)):
                _remove(file, path)
        finally:
            os.close(file)


def _remove(file: int, path: Path) -> None:
    """Remove a directory of decisions, unless a process uses it; leave the files of others.

    A shared lock of `file` is lost also if this fails, so of all that close at once, one succeeds.
    """
    with suppress(OSError):  # a lock, or a file that is not ours
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The verdicts first: without them nobody opens what is half removed.
        for name in sorted(os.listdir(file), key=lambda name: name not in _QUESTION_OF):
            is_file = stat.S_ISREG(os.stat(name, dir_fd=file, follow_symlinks=False).st_mode)
            if is_file and (name in _QUESTION_OF or _DECISION.fullmatch(name)):
                os.unlink(name, dir_fd=file)
        os.rmdir(path)


def _path(directory: Path, session: str) -> Path:
    if not _SESSION.fullmatch(session):
        raise SpecError(f"session {session[:80]!r} is not 1 to 64 hexadecimal digits")
    return directory / f"{_PREFIX}{session}"


def _name(replica: str, round_number: int, question: str) -> str:
    return f"{_digest(replica)}.{round_number:d}.{question}"


def _digest(replica: str) -> str:
    # Not the replica's name: another process chose it, and it may be any text.
    return blake2b(replica.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _byte(digest: str) -> int:
    """Return the byte that the ranks of a replica lock, anywhere beyond the end of a file."""
    return int(digest[:15], 16)


def _error(cause: OSError, what: str, path: Path) -> StoreError:
    return StoreError(cause.errno, f"cannot {what} in {str(path)!r}: {cause.strerror}")
