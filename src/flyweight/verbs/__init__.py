"""What a user asks for, each one sentence: move these weights from this source to that sink."""
