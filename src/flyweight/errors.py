"""Every error this library raises on purpose.

FlyweightError
├── SpecError (ValueError)                 a shape, box, layout or option that describes nothing
├── PlanError                              source and sink cannot be matched
│   ├── DTypeMismatch (TypeError)          the same name, another dtype
│   └── ShapeMismatch (ValueError)         the same name, another shape
├── FormatError                            bytes at rest are wrong
│   ├── ChecksumMismatch                   bytes are there, and are not the bytes that were written
│   ├── SnapshotIncomplete                 a save that never committed, or lost a part since
│   └── SnapshotNotFound (FileNotFoundError)  nothing at this place that we can read
├── StoreError (OSError)                   the operating system said no: full, forbidden, gone
├── TransportError                         another process did not do its part
│   ├── PeerLost                           it died, or closed its connection
│   ├── PeerFailed                         it lives and says what went wrong there
│   ├── PeerRefused                        it does not speak with us: token, protocol, address
│   ├── HandleGone                         what was offered is no longer there
│   └── TransferTimeout (TimeoutError)     nothing was heard of it for too long
├── VersionError                           a version that is not there, or is there already
│   └── DigestMismatch                     not the weights that were committed
├── LifecycleError                         a signal that the engine's state does not accept
│   └── Busy                               another operation runs; its id is in the text
└── MissingDependency (ImportError)        names the extra to install
"""

from __future__ import annotations

from collections.abc import Collection


class FlyweightError(Exception):
    """Catch this to catch all of ours. Layers on the way up add notes; they do not wrap."""

    _notes: tuple[str, ...] = ()

    def note(self, text: str) -> None:
        """Append a line that says where this happened: version, file, what was touched."""
        self._notes = (*self._notes, text)

    def __str__(self) -> str:
        # OSError and ImportError make their text from other fields than `args`.
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
        return made, args, {**self.__dict__, "errno": self.errno}  # which `args` need not have


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
    """Nothing was begun; `operation` is the id of what runs, if it has one."""

    def __init__(self, text: str, *, operation: str = "") -> None:
        super().__init__(text)
        self.operation = operation


class MissingDependency(FlyweightError, ImportError): ...


def listed(names: Collection[str]) -> str:
    """Return the first five of `names`, quoted, and how many more there are."""
    head = ", ".join(repr(name) for name in sorted(names)[:5])
    return head if len(names) <= 5 else f"{head} and {len(names) - 5} more"


def error_named(kind: str, text: str) -> FlyweightError:
    """Return the error that another process reports by class name; PeerFailed for unknown names."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, FlyweightError):
        return found(text)
    return PeerFailed(f"{kind}: {text}")
