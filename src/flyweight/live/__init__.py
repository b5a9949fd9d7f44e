"""Live updates: a publisher sends versions of a model to replicas on the same host."""
