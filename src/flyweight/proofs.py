"""Proofs: two processes show each other that they know a token, without sending it."""

from __future__ import annotations

import hashlib
import hmac


def proof(token: str, *words: str) -> str:
    """Return a MAC of `words` that only a process with the token can compute.

    The first word names the purpose, so that a proof for one purpose is no proof for another.
    """
    text = "\n".join(words).encode(errors="backslashreplace")  # words may come from anybody
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_same(shown: str, expected: str) -> bool:
    """Compare two proofs in constant time."""
    # As bytes: compare_digest refuses text outside of ASCII, which may come from anybody.
    return hmac.compare_digest(shown.encode(errors="replace"), expected.encode(errors="replace"))
