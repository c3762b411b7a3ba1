"""The run report (`report:run.json`): what each optimizer step took and moved, in a file.

Written by `trainstream report`'s other half, which reads it where no torch need be. A record is
made after each step of an optimizer, the file every ten seconds and at the end. It never breaks a
run: what fails is one line on stderr, and recording ends.
"""

import contextlib
import datetime
import json
import os
import platform
import stat
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process

from trainstream import _autoload, errors

FORMAT = "trainstream-run"
VERSION = 1
# Of extension.stats(): what a record adds up over its steps, and what it has as of its last one.
COUNTERS = (
    "evicted_bytes",
    "restored_bytes",
    "dropped_bytes",
    "in_place_bytes",
    "born_cold_bytes",
    "loaded_ahead_bytes",
    "demanded_bytes",
    "strays",
    "plans",
    "failures",
    "growths",
    "rebuilds",
    "copy_ns",
    "stall_ns",
)
GAUGES = (
    "peak_bytes",
    "resident_bytes",
    "cold_bytes",
    "arena_bytes",
    "planned_bytes",
    "host_in_use_bytes",
    "page_locked_bytes",
    "pageable_bytes",
    "optimizer_bytes",
)
# last: number of the record's last step; steps: how many it holds; elapsed_ns: at its end, since
# switching on; longest_ns: the longest of its steps.
COLUMNS = ("last", "steps", "elapsed_ns", "longest_ns", *COUNTERS, *GAUGES)

_RECORDS_MAX = 1024  # 27 numbers each: 0.3 MB of JSON, made in 10 ms.
_SAMPLES_MAX = 256
_WRITE_EVERY_NS = 10 * 10**9
_SHARE = 100  # Sampling and writing may each take a hundredth of the time.


class Steps:
    """Records of steps, at most `records_max`; where there would be more, neighbours are joined.

    Joined records add their counters up, so sums over all of them stay what they were.

    Args:
        records_max: An even number, from 2. Default 1024.
    """

    def __init__(self, records_max: int = _RECORDS_MAX):
        self.rows: list[list[int]] = []
        self._records_max = records_max
        self._steps_each = 1
        self._seen = dict.fromkeys(COUNTERS, 0)
        self._ended_ns = 0
        self.count = 0

    def add(self, elapsed_ns: int, stats: dict) -> None:
        """One more step has ended, `elapsed_ns` after switching on."""
        self.count += 1
        row = [self.count, 1, elapsed_ns, elapsed_ns - self._ended_ns]
        row += [self._since(key, stats.get(key, 0)) for key in COUNTERS]
        row += [int(stats.get(key, 0)) for key in GAUGES]
        self._ended_ns = elapsed_ns
        if self.rows and self.rows[-1][1] < self._steps_each:
            self.rows[-1] = _joined(self.rows[-1], row)
            return
        if len(self.rows) == self._records_max:
            pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
            self.rows = [_joined(first, second) for first, second in pairs]
            self._steps_each *= 2
        self.rows.append(row)

    def _since(self, key: str, value: int) -> int:
        change = int(value) - self._seen[key]
        self._seen[key] = int(value)
        return change


def _joined(first: list[int], second: list[int]) -> list[int]:
    added = slice(4, 4 + len(COUNTERS))
    sums = [a + b for a, b in zip(first[added], second[added], strict=True)]
    head = [second[0], first[1] + second[1], second[2], max(first[3], second[3])]
    return head + sums + second[added.stop :]


class Samples:
    """What memory held at the ends of some steps, by kind and place, at most `samples_max`.

    Looking takes time (it walks every parameter), so it is done as often as takes a hundredth of
    the run; where there would be too many, every second one is dropped.
    """

    def __init__(self, look: Callable[[], dict], samples_max: int = _SAMPLES_MAX):
        self.rows: list[list] = []
        self._look, self._samples_max = look, samples_max
        self._next_ns = 0
        self._gap_ns = 0

    def maybe_add(self, step: int, elapsed_ns: int) -> None:
        """Looks, if it is time to."""
        if elapsed_ns < self._next_ns and step > 3:  # The first steps differ: states come to be.
            return
        began_ns = time.monotonic_ns()
        now = self._look()
        if len(self.rows) >= self._samples_max:
            self.rows = self.rows[::2]
            self._gap_ns = 2 * (elapsed_ns - self.rows[0][1]) // self._samples_max
        self.rows.append([step, elapsed_ns, now])
        took_ns = time.monotonic_ns() - began_ns
        self._next_ns = elapsed_ns + max(_SHARE * took_ns, self._gap_ns)


class Recorder:
    """Records one process's steps and writes them to a file.

    Args:
        path: Where to; absolute. A process of rank 1 and up writes beside it, as run.rank1.json.
        state: trainstream._switch.State of this process.

    Raises:
        OSError: Nothing can be written there.
    """

    def __init__(self, path: str, state):
        self._path = _checked(os.path.realpath(os.path.expanduser(path)))
        self._state = state
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._steps, self._samples = Steps(), Samples(_memory_by_kind)
        self._next_write_ns = _WRITE_EVERY_NS
        self._began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._on = True

    def step(self) -> None:
        """After each step of an optimizer. Never raises."""
        # A second thread's step counts in the next record.
        if not self._on or os.getpid() != self._pid or not self._lock.acquire(blocking=False):
            return
        try:
            elapsed_ns = time.monotonic_ns() - self._state.started_ns
            self._steps.add(elapsed_ns, self._state.extension.stats())
            self._samples.maybe_add(self._steps.count, elapsed_ns)
            if elapsed_ns >= self._next_write_ns:
                self._write(finished=False)
        except Exception as fault:
            self._give_up(fault)
        finally:
            self._lock.release()

    def finish(self) -> None:
        """At the end of the process. Never raises."""
        if not self._on or os.getpid() != self._pid:
            return
        # Of children, those that train: workers that only import torch have nothing to say.
        if self._steps.count == 0 and parent_process() is not None:
            return
        try:
            self._write(finished=True)
        except Exception as fault:
            self._give_up(fault)

    def _give_up(self, fault: Exception) -> None:
        self._on = False
        say_not_written(self._path, fault)

    def _write(self, finished: bool) -> None:
        began_ns = time.monotonic_ns()
        write_atomically(_path_of_rank(self._path), self._content(finished))
        took_ns = time.monotonic_ns() - began_ns
        elapsed_ns = time.monotonic_ns() - self._state.started_ns
        self._next_write_ns = elapsed_ns + max(_WRITE_EVERY_NS, _SHARE * took_ns)

    def _content(self, finished: bool) -> str:
        import torch

        from trainstream import __version__

        stats = self._state.extension.stats()
        content = {
            "format": FORMAT,
            "version": VERSION,
            "finished": finished,
            "began": self._began,
            "elapsed_ns": time.monotonic_ns() - self._state.started_ns,
            "script": os.path.basename(sys.argv[0]) if sys.argv else "",
            "rank": _rank(),
            "config": {**vars(self._state.config)},
            "device": self._state.device,
            "device_name": _device_name(self._state.device),
            "versions": {
                "trainstream": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            "totals": {key: value for key, value in stats.items() if key != "device"},
            "rates": _rates() if finished else None,
            "step": _usual_step() if finished else None,
            "columns": COLUMNS,
            "steps": self._steps.rows,
            "memory": self._samples.rows,
        }
        return json.dumps(content, separators=(",", ":"), default=str)


def make(path: str, state) -> Recorder | None:
    """The recorder for `report:path`; None where there is none, and where nothing can be written,
    which is one line on stderr.
    """
    if not path:
        return None
    try:
        return Recorder(path, state)
    except OSError as fault:
        say_not_written(path, fault)
        return None


def say_not_written(path: str, fault: Exception) -> None:
    """One line on stderr."""
    reason = getattr(fault, "strerror", None) or f"{type(fault).__name__}: {fault}"
    _autoload.say(errors.report_not_written(path, " ".join(str(reason).split())))


def write_atomically(path: str, text: str) -> None:
    """Puts `text` in the place of the file, so that a reader sees the old one or the new one."""
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _checked(path: str) -> str:
    """Raises OSError where a file cannot be made: at the start, and not after hours."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # Replacing /dev/null would be a pity.
            raise OSError(0, "it is no regular file")
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise OSError(0, "its folder does not exist")
    if not os.access(folder, os.W_OK):
        raise OSError(0, "its folder may not be written to")
    return path


def _rank() -> int:
    """Of this process among those that train together; 0 for one alone."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def _path_of_rank(path: str) -> str:
    stem, end = os.path.splitext(path)
    if _rank() > 0:
        return f"{stem}.rank{_rank()}{end}"
    # Children without a rank must not write over their parent's.
    alone = parent_process() is None or "RANK" in os.environ
    return path if alone else f"{stem}.pid{os.getpid()}{end}"


def _memory_by_kind() -> dict[str, dict[str, int]]:
    """Bytes by kind and place, without the zeros."""
    from trainstream import reports

    rows = reports.make(None)["now"]
    return {
        kind: {p: n for p, n in row.items() if n} for kind, row in rows.items() if any(row.values())
    }


def _device_name(device: str) -> str:
    import torch

    if device != "cuda" or not torch.cuda.is_initialized():
        return device
    return torch.cuda.get_device_name()


def _usual_step() -> dict | None:
    """trainstream.report()'s dictionary, where a step was measured."""
    from trainstream import step_report

    with contextlib.suppress(Exception):
        return step_report.known()
    return None


def _rates() -> dict | None:
    """What the link and host memory give, if it was measured on this machine; measures nothing."""
    from trainstream import hardware

    with contextlib.suppress(Exception):
        return hardware.kept_rates()
    return None
