"""load_together: the ranks of an engine load a version from files, all of them or none.

    found     every rank has found the same version, or holds it already
    drained   no rank answers requests; only then does one write
    loaded    all hold the same version; otherwise none holds one, unless none has written

A rank that hears no answers after it has drained holds no version: another one may have written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flyweight.errors import FlyweightError, LifecycleError, PeerLost, TransferTimeout, VersionError
from flyweight.ports import RankExchange, UpdateOptions, UpdateReport, Weights
from flyweight.ranks.agreement import raise_first


class _OtherVersion(FlyweightError):
    """Another rank has found a newer version."""


def load_together(
    weights: Weights,
    load: Callable[[UpdateOptions], UpdateReport],
    options: UpdateOptions,
    exchange: RankExchange,
) -> UpdateReport:
    """Call `load` on all ranks, which fills the weights of this one."""
    for is_retry in (False, True):
        attempt = _Load(weights, options, exchange)
        try:
            return attempt.run(load)
        except _OtherVersion as other:
            if is_retry:
                raise VersionError(str(other)) from None
            options = replace(options, version=attempt.newest)
    raise AssertionError


class _Load:
    """One try to load a version on this rank."""

    def __init__(self, weights: Weights, options: UpdateOptions, exchange: RankExchange) -> None:
        self._weights, self._options, self._exchange = weights, options, exchange
        self._before = weights.version, weights.session
        self._has_said = self._may_write = False
        self.newest: int | None = None
        """The newest version that a rank has found."""

    def run(self, load: Callable[[UpdateOptions], UpdateReport]) -> UpdateReport:
        """Load a version, and return once all ranks hold it."""
        error: Exception | None = None
        report: UpdateReport | None = None
        try:
            report = load(replace(self._options, before=self._begin))
        except Exception as failure:  # a loader may raise anything, and the others must hear of it
            error = failure
        if not self._has_said:
            if error is not None and self._is_quiet(error):
                raise error
            version = None if report is None else report.version
            said = self._find(error, version=version, session=self._weights.session, is_held=True)
            assert report is not None  # else its error was raised
            if all(each["is_held"] for each in said):
                self._check_alike(said)
                return report
            self._drain(report.version)
        if self._may_write:
            self._end(error)
        if error is not None:
            raise error
        assert report is not None
        return report

    def _is_quiet(self, error: Exception) -> bool:
        """True if nothing was found while nobody requested a version: no rank needs to know."""
        is_waiting = not self._options.is_requested and self._options.timeout_seconds > 0
        return is_waiting and isinstance(error, TransferTimeout)

    def _begin(self, found: int) -> None:
        self._find(None, version=found, is_held=False)
        self._drain(found)

    def _find(self, error: Exception | None, **facts: Any) -> list[dict[str, Any]]:
        self._has_said = True
        said = self._exchange("found", error, **facts)
        raise_first(said, error)
        versions = [each["version"] for each in said]
        self.newest = max(versions)
        if len(set(versions)) > 1:
            raise _OtherVersion(f"the ranks find versions {versions}")
        return said

    def _drain(self, version: int) -> None:
        error: Exception | None = None
        try:
            if self._options.before is not None:
                self._options.before(version)
        except Exception as failure:
            error = failure
        try:
            said = self._exchange("drained", error)
        except PeerLost as lost:  # the others may have heard all answers, and write
            self._forget(lost)
            raise
        raise_first(said, error)
        self._may_write = True

    def _end(self, error: Exception | None) -> None:
        held = self._weights.version, self._weights.session
        facts = {"version": held[0], "session": held[1], "is_as_before": held == self._before}
        try:
            said = self._exchange("loaded", error, **facts)
        except (PeerLost, LifecycleError) as lost:
            self._forget(lost)
            raise
        try:
            raise_first(said, error)
            self._check_alike(said)
        except Exception as failure:
            if not all(each["is_as_before"] for each in said):
                self._weights.forget(f"not all ranks have loaded it: {failure}")
            raise

    @staticmethod
    def _check_alike(said: list[dict[str, Any]]) -> None:
        versions = [each["version"] for each in said]
        if None in versions:
            raise LifecycleError(f"rank {versions.index(None)} holds no whole version")
        if len(set(versions)) > 1:
            raise LifecycleError(f"the ranks hold versions {versions}")
        if len({each["session"] for each in said}) > 1:
            raise LifecycleError(f"the ranks hold version {versions[0]} of different sources")

    def _forget(self, reason: FlyweightError) -> None:
        self._weights.forget(f"it is not known what the other ranks hold: {reason}")
