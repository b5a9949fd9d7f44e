"""How bytes rest: each format's files as a manifest with extents, and the other way round."""
