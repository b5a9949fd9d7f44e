"""How bytes rest: each format's files told as a manifest with extents, and the other way round."""
