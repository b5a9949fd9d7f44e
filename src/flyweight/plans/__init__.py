"""What must move: pure functions from what is there and what is wanted to data."""
