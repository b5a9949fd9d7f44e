"""When a round may run: states, the shared status cell, and what drives an engine through it."""
