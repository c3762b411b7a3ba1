"""The end of a process: the line on exit."""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import parent_process, util
from types import ModuleType

_printed = False


def install(
    extension: ModuleType, started_ns: int, before_line: Callable[[], None] | None = None
) -> None:
    """Called once for each process, when trainstream is switched on.

    Args:
        before_line: What else is to be done at the end, as writing the run report. It never raises.
    """
    arguments = (extension, started_ns, os.getpid(), before_line)
    atexit.register(_finish, *arguments)
    _finish_in_children_too(arguments)


def _finish_in_children_too(arguments: tuple) -> None:
    """For children of multiprocessing's fork server, and those forked before torch was imported.

    They leave by os._exit(), which skips atexit, but run finalizers, the lowest priority last.
    """

    def finish_last(_=None) -> None:
        util.Finalize(None, _finish, args=arguments, exitpriority=-1000)

    if parent_process() is not None:
        finish_last()
    else:
        # Still importing the main module, perhaps: a child forgets its finalizers after that.
        util.register_after_fork(_finish, finish_last)


def line(
    stats: dict[str, int | float | str], elapsed_ns: int, step: dict[str, str] | None = None
) -> str:
    """The exit line. Bytes are plain integers, since scripts read them.

    Args:
        step: Fields about a usual step; see _step_fields. Default None: none was measured.
    """
    stall_percent = 100.0 * stats["stall_ns"] / max(elapsed_ns, 1)
    fields = {
        "device": stats["device"],
        "budget": stats["budget_bytes"],
        "peak": stats["peak_bytes"],
        "evicted": stats["evicted_bytes"],
        "restored": stats["restored_bytes"],
        "in_place": stats["in_place_bytes"],
        # The peak, since closing may already have given memory back.
        "pinned": stats["page_locked_bytes_peak"],
        "steps": stats["steps"],
        "stall": f"{stall_percent:.1f}%",
    }
    fields.update(step or {})
    return "trainstream: " + " ".join(f"{key}={value}" for key, value in fields.items())


def _step_fields() -> dict[str, str]:
    """What a step took, was to take and cannot be faster than; empty where none was measured."""
    from trainstream import step_report

    report = step_report.known()
    if report is None:
        return {}
    seconds = {
        "step": report["step_seconds"],
        "predicted": report["predicted_seconds"],
        "bound": report["bound_seconds"],
    }
    fields = {key: f"{value:.4g}s" for key, value in seconds.items() if value is not None}
    return fields | ({"limit": report["limit"]} if report["limit"] else {})


def _finish(
    extension: ModuleType, started_ns: int, pid: int, before_line: Callable[[], None] | None
) -> None:
    """Stops the watching, then prints the line: once, and not in forked children."""
    global _printed
    if _printed or pid != os.getpid():
        return
    _printed = True
    if before_line is not None:
        before_line()
    try:
        elapsed_ns = time.monotonic_ns() - started_ns
        extension.close()
        step = None
        with contextlib.suppress(Exception):  # The numbers that count do not depend on it.
            step = _step_fields()
        text = line(extension.stats(), elapsed_ns, step)
    except Exception as fault:
        text = f"trainstream: no summary: {type(fault).__name__}: {' '.join(str(fault).split())}"
    try:
        # One write, so that lines of several processes do not mix.
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except Exception:
        pass  # Closed or gone: an exit line is not worth a changed exit status.
