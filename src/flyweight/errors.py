"""Every error that this library raises on purpose.

FlyweightError
├── SpecError (ValueError)                 a shape, box, layout or option that describes nothing
├── PlanError                              source and sink cannot be matched
│   ├── DTypeMismatch (TypeError)          the same name, another dtype
│   └── ShapeMismatch (ValueError)         the same name, another shape
├── FormatError                            bytes at rest are wrong
│   ├── ChecksumMismatch                   bytes are there, and are not the bytes that were written
│   ├── SnapshotIncomplete                 a save that never committed, or lost a file since
│   └── SnapshotNotFound (FileNotFoundError)  nothing that we can read at this place
├── StoreError (OSError)                   the operating system refused: disk full, no permission
├── TransportError                         another process failed, or cannot be reached
│   ├── PeerLost                           it died, or closed its connection
│   ├── PeerFailed                         it is alive and reports what failed there
│   ├── PeerRefused                        it rejects this process: token, protocol, address
│   ├── HandleGone                         the offered memory no longer exists
│   └── TransferTimeout (TimeoutError)     it did not answer before the deadline
├── VersionError                           a version that does not exist, or exists already
│   └── DigestMismatch                     not the weights that were committed
├── LifecycleError                         a signal that the engine's state does not accept
│   └── Busy                               another operation is running; its id is in the text
└── MissingDependency (ImportError)        names the extra to install
"""

from __future__ import annotations

from collections.abc import Collection


class FlyweightError(Exception):
    """The base of all errors of this library.

    A layer that knows more adds a line with `note` and re-raises; it does not wrap the error.
    """

    _notes: tuple[str, ...] = ()

    def note(self, text: str) -> None:
        """Append a line that says where this happened: the version, the file, the replica."""
        self._notes = (*self._notes, text)

    def __str__(self) -> str:
        # OSError and ImportError build their text from other fields than `args`.
        return "\n  ".join((super().__str__(), *self._notes))


class SpecError(FlyweightError, ValueError): ...


class PlanError(FlyweightError): ...


class DTypeMismatch(PlanError, TypeError): ...


class ShapeMismatch(PlanError, ValueError): ...


class FormatError(FlyweightError): ...


class ChecksumMismatch(FormatError): ...


class SnapshotIncomplete(FormatError): ...


class SnapshotNotFound(FormatError, FileNotFoundError): ...


class StoreError(FlyweightError, OSError):
    def __reduce__(self) -> tuple[object, ...]:
        made, args = tuple(super().__reduce__())[:2]
        return made, args, {**self.__dict__, "errno": self.errno}  # `args` may lack it


class TransportError(FlyweightError): ...


class PeerLost(TransportError): ...


class PeerFailed(TransportError): ...


class PeerRefused(TransportError): ...


class HandleGone(TransportError): ...


class TransferTimeout(TransportError, TimeoutError): ...


class VersionError(FlyweightError): ...


class DigestMismatch(VersionError): ...


class LifecycleError(FlyweightError): ...


class Busy(LifecycleError):
    """Nothing was started; `operation` is the id of the operation that is running, or ""."""

    def __init__(self, text: str, *, operation: str = "") -> None:
        super().__init__(text)
        self.operation = operation


class MissingDependency(FlyweightError, ImportError): ...


def listed(names: Collection[str]) -> str:
    """Return the first five of `names`, quoted, and the number of the rest."""
    head = ", ".join(repr(name) for name in sorted(names)[:5])
    return head if len(names) <= 5 else f"{head} and {len(names) - 5} more"


def error_named(kind: str, text: str) -> FlyweightError:
    """Return the error that another process reports by class name; PeerFailed for unknown names."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, FlyweightError):
        return found(text)
    return PeerFailed(f"{kind}: {text}")
