"""Live updates: a publisher sends versions of a model to replicas, on its host or on others."""
