"""What must move: pure functions that compare what exists with what is wanted."""
