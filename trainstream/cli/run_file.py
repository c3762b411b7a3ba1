"""A run report as `report:run.json` leaves it: read, checked, and what it says about a run's limit.

Knows neither torch nor the extension: a report may be read on a machine that has neither.
"""

import json
import os
from dataclasses import dataclass

from trainstream import bound, errors
from trainstream._text import format_bytes, format_rate, format_seconds

KINDS = ("weights", "gradients", "optimizer", "activations", "other")
_FORMAT, _VERSION = "trainstream-run", 1
_WARM_UP = 2  # Steps in which states come to be and the plan is made.
_LIMITING_SHARE = 0.7  # Of a step's time, from which on a term is said to limit it.
_WAITING_SHARE = 0.25


@dataclass(frozen=True)
class Run:
    """One process's run.

    Args:
        raw: The file's content.
        records: What its rows say, one dictionary each, first to last; `seconds` (of all its
            steps) and `begin_s` added.
        samples: (number of the step, seconds since switching on, {kind: {place: bytes}}).
    """

    raw: dict
    records: list[dict]
    samples: list[tuple[int, float, dict]]

    @property
    def totals(self) -> dict:
        """The counters at the end, as trainstream.memory_stats() has them."""
        return self.raw["totals"]

    @property
    def budget_bytes(self) -> int:
        """Device memory that the run was given."""
        return self.totals.get("budget_bytes", 0)

    @property
    def steps(self) -> int:
        """How many steps of an optimizer were recorded."""
        return sum(record["steps"] for record in self.records)


@dataclass(frozen=True)
class Steady:
    """Means of one step, over the later half of a run. Bytes, seconds and numbers of times."""

    steps: int
    seconds: float
    to_device: float
    to_host: float
    in_place: float
    ahead: float
    demanded: float
    strays: float
    copying_s: float
    waiting_s: float


def load(path: str) -> Run:
    """Reads a report.

    Raises:
        TrainstreamError: There is no such file, or it is no run report of this version.
    """
    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file)
    except OSError as fault:
        raise errors.cannot_read(path, fault.strerror or str(fault)) from None
    except ValueError as fault:
        raise errors.no_run_report(path, f"it is no JSON: {fault}") from None
    if not isinstance(raw, dict) or raw.get("format") != _FORMAT:
        raise errors.no_run_report(path, f'it has no "format": "{_FORMAT}"')
    if raw.get("version") != _VERSION:
        raise errors.no_run_report(path, f"its version is {raw.get('version')}, not {_VERSION}")
    try:
        return _run_of(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as fault:
        raise errors.no_run_report(path, f"{type(fault).__name__}: {fault}") from None


def _run_of(raw: dict) -> Run:
    records, began_ns = [], 0
    for row in raw["steps"]:
        record = dict(zip(raw["columns"], row, strict=True))
        record["begin_s"] = began_ns / 1e9
        record["seconds"] = (record["elapsed_ns"] - began_ns) / 1e9
        began_ns = record["elapsed_ns"]
        records.append(record)
    samples = [(int(step), ns / 1e9, dict(now)) for step, ns, now in raw["memory"]]
    run = Run(raw, records, samples)
    steady(run)  # Whatever is missing shows here, and not in the middle of a page.
    int(run.budget_bytes)
    return run


def steady(run: Run) -> Steady:
    """What one step takes once the run is in its stride."""
    warm = [r for r in run.records if r["last"] > _WARM_UP] or run.records
    later = warm[len(warm) // 2 :]
    steps = sum(r["steps"] for r in later)

    def mean(key: str) -> float:
        return sum(r[key] for r in later) / max(steps, 1)

    return Steady(
        steps,
        mean("seconds"),
        mean("restored_bytes"),
        mean("evicted_bytes"),
        mean("in_place_bytes"),
        mean("loaded_ahead_bytes"),
        mean("demanded_bytes"),
        mean("strays"),
        mean("copy_ns") / 1e9,
        mean("stall_ns") / 1e9,
    )


def limit(run: Run) -> str:
    """One sentence: what limits the run's steps, with the numbers that say so."""
    step = steady(run)
    if not run.records:
        return "No optimizer made a step, so there is nothing to say about its limit."
    took = format_seconds(step.seconds)
    if step.to_device + step.to_host + step.in_place == 0:
        return (
            f"Nothing moves: the run fits its {format_bytes(run.budget_bytes)}, so its own work "
            f"limits a step of {took}, as without trainstream."
        )
    measured = run.raw.get("step") or {}
    if measured.get("bound"):
        waited = sum(measured["stall_seconds"].values())
        return (
            f"A step of {format_seconds(measured['step_seconds'])} computes for "
            f"{format_seconds(measured['compute_seconds'])} and waits {format_seconds(waited)} for "
            f"copies; {bound.limit_text(measured)}."
        )
    name, seconds, why = max(_terms(run, step), key=lambda term: term[1])
    share = min(seconds / max(step.seconds, 1e-9), 1)
    if share >= _LIMITING_SHARE:
        return f"{name} limits: {why}, {share:.0%} of a step of {took}."
    if step.waiting_s > _WAITING_SHARE * step.seconds:
        late = step.to_device - step.ahead
        return (
            f"Waiting for copies limits: {step.waiting_s / max(step.seconds, 1e-9):.0%} of a step "
            f"of {took}; of {format_bytes(step.to_device)} that come to the device "
            f"{late / max(step.to_device, 1):.0%} come when they are already needed "
            f"({step.strays:.0f} uses a step are not in the plan)."
        )
    return (
        f"The run's own work limits a step of {took}: copies ran in "
        f"{min(step.copying_s / max(step.seconds, 1e-9), 1):.0%} of it, beside that work."
    )


def _terms(run: Run, step: Steady) -> list[tuple[str, float, str]]:
    """(name, seconds a step, why) of whatever may limit besides the run's own work."""
    terms = [("Copying", step.copying_s, "copies ran for " + format_seconds(step.copying_s))]
    rates = run.raw.get("rates") or {}
    moved = step.to_device + step.to_host + step.in_place
    for name, size_bytes, rate in (
        ("The link to the device", step.to_device, rates.get("both", {}).get("to_device", 0)),
        ("The link to the host", step.to_host, rates.get("both", {}).get("to_host", 0)),
        ("Host memory", moved, rates.get("host_memory_bytes_per_second", 0)),
    ):
        if rate:
            seconds = size_bytes / rate
            why = (
                f"{format_bytes(size_bytes)} a step at the {format_rate(rate)} that were measured "
                f"here take {format_seconds(seconds)}"
            )
            terms.append((name, seconds, why))
    return terms


def summary(run: Run) -> list[tuple[str, str]]:
    """(what, value) for a person, in the order in which one asks."""
    step, totals = steady(run), run.totals
    rows = [
        ("script", str(run.raw.get("script", "")) or "(none)"),
        ("device", str(run.raw.get("device_name", run.raw.get("device", "")))),
        ("steps", f"{run.steps}" + ("" if run.raw.get("finished") else ", still going or killed")),
        ("step", format_seconds(step.seconds)),
        ("budget", format_bytes(run.budget_bytes)),
        ("device peak", format_bytes(totals.get("peak_bytes", 0))),
        ("page-locked peak", format_bytes(totals.get("page_locked_bytes_peak", 0))),
        ("to device, a step", format_bytes(step.to_device)),
        ("to host, a step", format_bytes(step.to_host)),
        ("in place, a step", format_bytes(step.in_place)),
        ("loaded ahead, a step", format_bytes(step.ahead)),
        ("demanded, a step", format_bytes(step.demanded)),
        ("uses outside the plan, a step", f"{step.strays:.1f}"),
    ]
    failures = totals.get("failures", 0)
    return rows + ([("moves refused", str(failures))] if failures else [])


def default_output(path: str, ending: str) -> str:
    """Where something made of a report goes: beside it, under its name."""
    return os.path.splitext(path)[0] + ending
