"""One quiet line for work that takes seconds; nothing where nobody looks."""

import sys
import time

from trainstream._text import format_bytes

_QUIET_SECONDS = 0.5
_BETWEEN_SECONDS = 0.1


class Progress:
    """A line on stderr that says how far it is, and goes when it is done.

        with Progress("moving the model", total_bytes) as progress:
            progress.add(moved_bytes)

    Only on a terminal, and only of what has taken half a second already.

    Args:
        what: Is being done.
        total_bytes: Of all that is to be done.
        stream: Where the line goes. Default: stderr.
    """

    def __init__(self, what: str, total_bytes: int, stream=None):
        self._stream = sys.stderr if stream is None else stream
        self._what = what
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._next = time.monotonic() + _QUIET_SECONDS
        self._shown = 0  # Characters of the line.
        self._on = bool(getattr(self._stream, "isatty", lambda: False)())

    def add(self, size_bytes: int) -> None:
        """So many bytes more are done."""
        self._done_bytes += size_bytes
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        self._next = now + _BETWEEN_SECONDS
        line = (
            f"trainstream: {self._what}: {format_bytes(self._done_bytes)} of "
            f"{format_bytes(self._total_bytes)}"
        )
        self._stream.write("\r" + line.ljust(self._shown))
        self._stream.flush()
        self._shown = len(line)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()
