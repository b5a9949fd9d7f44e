"""Proofs: how two processes show each other that they know a token, and neither sends it."""

from __future__ import annotations

import hashlib
import hmac


def proof(token: str, *words: str) -> str:
    """Return what only someone who knows the token can compute of these words.

    The first word says what is proven, so that the proof of one thing is none of another.
    """
    text = "\n".join(words).encode(errors="backslashreplace")  # some words come from strangers
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()


def is_same(shown: str, expected: str) -> bool:
    """Compare in a time that tells nothing of where the two differ."""
    # As bytes: text outside of ASCII cannot be compared, and may come from anybody.
    return hmac.compare_digest(shown.encode(errors="replace"), expected.encode(errors="replace"))
