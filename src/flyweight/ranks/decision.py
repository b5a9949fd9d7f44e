"""RoundDecisions: the verdicts for a replica in a round, stored once, for all its ranks.

A leader that is killed between two messages would leave one rank with `commit` and another
without. So every rank stores what it hears before it obeys, and the first proposal wins:

    rank that hears write     "write"      rank that does not hear it, or not in time     "keep"
    rank that hears commit    "commit"     rank that does not hear it, or not in time     "fail"

A rank that finds "commit" holds the new version, one that finds "keep" the old one, and any other
none: after "write" another rank may have written.

The store is a directory with one file per verdict. A decision is a hard link from the name of its
question to the file of its verdict: one system call, which fails if the name exists. So a killed
process leaves a whole decision or none, a stopped one delays nobody, and nothing waits.

All ranks of a replica are on one host, and the directory is there; `run_directory.py` says where.
It is of one session of the publisher, and made by the first rank that opens it. A rank that uses it
holds a shared lock, which the kernel releases, and only a process that finds no lock removes it.
A rank also locks a byte for its replica, so that others know which replicas can still ask.
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
from time import sleep
from typing import Literal

from flyweight.errors import SpecError, StoreError
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
_TRIES, _RETRY_SECONDS = 50, 0.01


class RoundDecisions:
    """The decisions on one replica in one session of a publisher, opened by one of its ranks."""

    def __init__(self, directory: Path, session: str, replica: str) -> None:
        """Open the decisions; make their directory if this is the first rank.

        Remove those of other sessions that no process uses any more.

        directory: a private directory that all ranks of the replica share.
        """
        self.path, self._replica, self._digest = (
            _path(directory, session),
            replica,
            _digest(replica),
        )
        self._last: int | None = None
        """The round that the replica is in."""
        self._lock, self._file, self._locks = threading.Lock(), -1, -1
        remove_unused(directory)
        call_in_child(self._close_in_child)
        try:
            self._open()
        except BaseException as error:
            self._close_file()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise _error(error, "open", self.path) from error
            raise

    def _open(self) -> None:
        for _ in range(_TRIES):
            if self._is_opened():
                break
            self._close_file()
            sleep(_RETRY_SECONDS)
        else:
            raise StoreError(f"{str(self.path)!r} is locked by a process that removes it")
        self._locks = opened(self.path / "write", os.O_RDWR | os.O_NOFOLLOW)
        locked(self._locks, _byte(self._digest), 1, is_shared=True)

    def _is_opened(self) -> bool:
        """Open the directory and lock it; return False if another process removes it just now."""
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # removed just now
                self.path.chmod(0o700)  # whatever the umask is
        try:
            self._file = opened(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            if whose := exposure(os.fstat(self._file)):
                raise SpecError(
                    f"directory {str(self.path)!r} {whose}; it has to belong to user "
                    f"{os.geteuid()} with mode 700"
                )
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            for verdict in _QUESTION_OF:
                with suppress(FileExistsError):
                    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
                    os.close(os.open(verdict, flags, 0o600, dir_fd=self._file))
            self._verdicts = {self._inode(each): each for each in _QUESTION_OF}
            is_whole = len(self._verdicts) == len(_QUESTION_OF)
            # It has files and a lock now. If it still has its name, nobody removes it.
            is_in_place = self._is_in_place()
        except (FileNotFoundError, BlockingIOError):
            return False
        if not is_whole:
            raise StoreError(f"{str(self.path)!r} has one file for two verdicts; remove it")
        return is_in_place

    def begin(self, round_number: int) -> None:
        """Forget the replica's last round; raise StoreError if other ranks look elsewhere now.

        Every rank calls this before it says that it has drained. The round has begun, so all ranks
        have asked for a version, and have settled their last round.
        """
        with self._lock:
            self._check_open()
            if not self._is_in_place():
                raise StoreError(f"{str(self.path)!r} was removed while ranks of an engine use it")
            if self._last is None:
                with suppress(OSError):  # then the next rank tries it again
                    self._forget_others(round_number)
            else:
                for question in ("write", "commit"):
                    self._unlink(self._name(self._last, question))
            self._last = round_number

    def decide(self, round_number: int, proposal: Verdict) -> Verdict:
        """Store a proposal if nothing is decided yet; return what is decided. Does not wait.

        A process that cannot store or read the decision gets StoreError, and must not serve.
        """
        question = _QUESTION_OF[proposal]
        name = self._name(round_number, question)
        with self._lock:
            self._check_open()
            try:
                os.link(proposal, name, src_dir_fd=self._file, dst_dir_fd=self._file)
                return proposal
            except OSError as cause:
                what = f"decide round {round_number} of {self._replica!r}"
                error = _error(cause, what, self.path)
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

    def _is_in_place(self) -> bool:
        """True if the directory still has its name."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._file))

    def _forget_others(self, round_number: int) -> None:
        """Remove decisions on earlier rounds, and on replicas none of whose processes can ask."""
        for name in os.listdir(self._file):
            if _DECISION.fullmatch(name):
                digest, number, _ = name.split(".")
                if digest == self._digest:
                    is_over = int(number) != round_number
                else:
                    is_over = locked_bytes(self._locks, _byte(digest)) is None
                if is_over:
                    self._unlink(name)

    def _name(self, round_number: int, question: str) -> str:
        return f"{self._digest}.{round_number:d}.{question}"

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
            continue  # removed meanwhile, or not made by a rank
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
        for name in os.listdir(file):
            is_file = stat.S_ISREG(os.stat(name, dir_fd=file, follow_symlinks=False).st_mode)
            if is_file and (name in _QUESTION_OF or _DECISION.fullmatch(name)):
                os.unlink(name, dir_fd=file)
        os.rmdir(path)


def _path(directory: Path, session: str) -> Path:
    if not _SESSION.fullmatch(session):
        raise SpecError(f"session {session[:80]!r} is not 1 to 64 hexadecimal digits")
    return directory / f"{_PREFIX}{session}"


def _digest(replica: str) -> str:
    # Not the replica's name: another process chose it, and it may be any text.
    return blake2b(replica.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _byte(digest: str) -> int:
    """Return the byte that the ranks of a replica lock, anywhere beyond the end of a file."""
    return int(digest[:15], 16)


def _error(cause: OSError, what: str, path: Path) -> StoreError:
    return StoreError(cause.errno, f"cannot {what} in {str(path)!r}: {cause.strerror}")
