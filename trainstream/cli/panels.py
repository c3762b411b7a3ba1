"""What the charts of a run report show: numbers and names, apart from who draws them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from trainstream.cli.run_file import KINDS, Run

# Okabe and Ito's colours, which differ for colour-blind readers too.
BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#8A8F98"
_KIND_COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, PURPLE, GREY), strict=True))
_ON_HOST = ("host_pinned", "host_pageable")


@dataclass(frozen=True)
class Series:
    """One quantity over steps; `steps` and `values` are of one length."""

    name: str
    colour: str
    steps: list[int]
    values: list[float]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart.

    Args:
        unit: "bytes", "seconds" or "count".
        note: What a reader must know to read it right.
        stacked: Areas, from the bottom up.
        lines: Over them.
    """

    title: str
    unit: str
    note: str
    stacked: list[Series] = field(default_factory=list)
    lines: list[Series] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Whether there is nothing to draw but zeros."""
        return not any(any(series.values) for series in [*self.stacked, *self.lines])


def of(run: Run) -> list[Panel]:
    """The charts of a run, in reading order."""
    return [_device(run), _host(run), _time(run), _moved(run), _plan(run), _strays(run)]


def _line(
    run: Run, name: str, colour: str, value: Callable[[dict], float], dashed: bool = False
) -> Series:
    steps = [record["last"] for record in run.records]
    return Series(name, colour, steps, [value(record) for record in run.records], dashed)


def _gauge(run: Run, name: str, colour: str, key: str, dashed: bool = False) -> Series:
    return _line(run, name, colour, lambda record: record[key], dashed)


def _per_step(run: Run, name: str, colour: str, key: str) -> Series:
    return _line(run, name, colour, lambda record: record[key] / record["steps"])


def _by_kind(run: Run, places: tuple[str, ...]) -> list[Series]:
    steps = [step for step, _, _ in run.samples]
    made = []
    for kind in KINDS:
        rows = [now.get(kind, {}) for _, _, now in run.samples]
        values = [sum(row.get(place, 0) for place in places) for row in rows]
        made.append(Series(kind, _KIND_COLOURS[kind], steps, values))
    return [series for series in made if any(series.values)]


def _device(run: Run) -> Panel:
    return Panel(
        "Device memory",
        "bytes",
        "By kind, at the ends of steps, when most activations are gone; the peak is of all so far.",
        _by_kind(run, ("device",)),
        [
            _gauge(run, "peak so far", "ink", "peak_bytes"),
            _line(run, "budget", RED, lambda _: run.budget_bytes, dashed=True),
        ],
    )


def _host(run: Run) -> Panel:
    steps = [step for step, _, _ in run.samples]
    copies = [sum(r.get("host_copies", 0) for r in now.values()) for _, _, now in run.samples]
    beside = Series("host copies", SKY, steps, copies)
    return Panel(
        "Host memory",
        "bytes",
        "By kind, at the ends of steps; host copies are of what is on the device as well.",
        _by_kind(run, _ON_HOST) + ([beside] if any(copies) else []),
        [_gauge(run, "page-locked", "ink", "page_locked_bytes")],
    )


def _time(run: Run) -> Panel:
    return Panel(
        "Step time",
        "seconds",
        "Copies run beside the step's own work; what it waited for is time lost.",
        lines=[
            _line(run, "step", BLUE, lambda record: record["seconds"] / record["steps"]),
            _line(run, "time with copies", ORANGE, lambda r: r["copy_ns"] / 1e9 / r["steps"], True),
            _line(run, "waited for copies", RED, lambda r: r["stall_ns"] / 1e9 / r["steps"]),
        ],
    )


def _moved(run: Run) -> Panel:
    return Panel(
        "Bytes a step",
        "bytes",
        "Used in place: by operators, over the link. Left without a copy: the host's was right.",
        lines=[
            _per_step(run, "to device", BLUE, "restored_bytes"),
            _per_step(run, "to host", ORANGE, "evicted_bytes"),
            _per_step(run, "used in place", GREEN, "in_place_bytes"),
            _per_step(run, "left without a copy", GREY, "dropped_bytes"),
        ],
    )


def _plan(run: Run) -> Panel:
    return Panel(
        "The plan",
        "bytes",
        "Planned: of the storages it moves. Loaded ahead of need, or demanded before they came.",
        lines=[
            _gauge(run, "arena", GREY, "arena_bytes", dashed=True),
            _gauge(run, "planned", PURPLE, "planned_bytes", dashed=True),
            _per_step(run, "loaded ahead, a step", GREEN, "loaded_ahead_bytes"),
            _per_step(run, "demanded, a step", RED, "demanded_bytes"),
        ],
    )


def _strays(run: Run) -> Panel:
    return Panel(
        "Outside the plan",
        "count",
        "Uses that the planned step does not have, and plans made: a new one costs a few steps.",
        lines=[
            _per_step(run, "strays, a step", RED, "strays"),
            _line(run, "plans made", PURPLE, lambda record: record["plans"]),
        ],
    )
