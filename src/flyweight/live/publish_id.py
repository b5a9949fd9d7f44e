"""PublishId: names the content of one publish."""

from __future__ import annotations

import msgspec


class PublishId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Never used twice: a restarted trainer is another session. Users call it by its version."""

    session: str
    version: int

    def follows(self, other: PublishId) -> bool:
        """True if it is a later version of the same session."""
        return self.session == other.session and self.version > other.version

    def __str__(self) -> str:
        return f"version {self.version} of session {self.session[:6]}"
