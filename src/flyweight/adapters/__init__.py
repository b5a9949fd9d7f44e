"""Tensors: the only room that knows torch, Paddle and numpy arrays. None is imported here."""
