"""What was decided and why, in order: a session's log."""

import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """One decision.

    Args:
        step: Optimizer steps that had ended.
        seconds: Since wrap() was called.
        what: What was decided: "blocks", "plan", "settled", "watchdog", "optimizer", "distributed",
            "moved" or "unwrapped".
        why: One sentence.
        numbers: What it was decided by; bytes unless named otherwise.
    """

    step: int
    seconds: float
    what: str
    why: str
    numbers: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        numbers = "".join(f" {name}={value}" for name, value in self.numbers.items())
        return f"step {self.step} ({self.seconds:.1f} s): {self.what}: {self.why}{numbers}"


class EventLog(list):
    """The events so far. Owner: the session."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self._began = time.monotonic()

    def add(self, what: str, why: str, **numbers: object) -> None:
        self.append(Event(self.step, time.monotonic() - self._began, what, why, numbers))
