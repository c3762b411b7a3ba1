"""A run report as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

Source: Google, "Trace Event Format": complete events (X), counters (C) and metadata (M); times in
microseconds.
"""

from trainstream.cli.run_file import KINDS, Run

_PID, _TID = 1, 1
_PLACES = {"device": ("device",), "host": ("host_pinned", "host_pageable")}


def make(run: Run) -> dict:
    """The trace as a dictionary, for JSON."""
    name = f"trainstream: {run.raw.get('script', '')} on {run.raw.get('device_name', '')}"
    events = [
        {"name": "process_name", "ph": "M", "pid": _PID, "args": {"name": name}},
        {"name": "thread_name", "ph": "M", "pid": _PID, "tid": _TID, "args": {"name": "steps"}},
    ]
    for record in run.records:
        events += _of_record(record)
    for _, seconds, now in run.samples:
        for place, names in _PLACES.items():
            sums = {k: sum(now.get(k, {}).get(n, 0) for n in names) for k in KINDS}
            events.append(_counter(f"{place}, by kind (bytes)", seconds, sums))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_record(record: dict) -> list[dict]:
    first, last = record["last"] - record["steps"] + 1, record["last"]
    begin, seconds = record["begin_s"], max(record["seconds"], 1e-9)
    counters = ("evicted_bytes", "restored_bytes", "dropped_bytes", "in_place_bytes")
    plan = ("loaded_ahead_bytes", "demanded_bytes", "strays", "plans", "failures")
    step = {
        "name": f"step {last}" if first == last else f"steps {first} to {last}",
        "cat": "step",
        "ph": "X",
        "pid": _PID,
        "tid": _TID,
        "ts": begin * 1e6,
        "dur": seconds * 1e6,
        "args": {key: record[key] for key in (*counters, *plan, "copy_ns", "stall_ns")},
    }
    # A counter holds from its time on: rates from the step's begin, places from its end.
    rates = {
        "to device": record["restored_bytes"] / seconds,
        "to host": record["evicted_bytes"] / seconds,
    }
    places = {"resident": record["resident_bytes"], "cold": record["cold_bytes"]}
    end = begin + seconds
    return [
        step,
        _counter("link (bytes/s)", begin, rates),
        _counter("managed storages (bytes)", end, places),
        _counter("page-locked (bytes)", end, {"locked": record["page_locked_bytes"]}),
        _counter("arena of the plan (bytes)", end, {"arena": record["arena_bytes"]}),
    ]


def _counter(name: str, seconds: float, values: dict) -> dict:
    return {"name": name, "ph": "C", "pid": _PID, "ts": seconds * 1e6, "args": values}
