"""A clock that stands still until a test moves it, so that nothing is late on a busy machine."""

from child_processes import until


class Clock:
    def __init__(self):
        self.now, self._num_looks = 100.0, 0

    def __call__(self):
        self._num_looks += 1
        return self.now

    def is_looked_at(self):
        """Wait until those who wait by this clock have seen what time it is."""
        enough = self._num_looks + 6
        until(lambda: self._num_looks >= enough)
