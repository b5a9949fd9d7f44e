"""Bytes in motion between processes. Knows no tensor."""
