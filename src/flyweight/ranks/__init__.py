"""Ranks of one job: how they find and hear each other."""
