"""`trainstream.report()`: the plan, what a step was to take and took, and what limits it.

Times are the device's: marks on the stream that most operators run on (csrc/pager/step_clock.h).
"""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress

from trainstream import _step, _switch, bound
from trainstream._text import format_bytes, format_seconds

# Why compute waited: key of the extension's, key of the report, words.
_STALLS = (
    ("late_ns", "late", "loaded ahead, and not there yet"),
    ("demand_ns", "demand", "loaded when an operator asked"),
    ("room_ns", "room", "what had to leave first"),
    ("update_ns", "update", "the optimizer's updates in host memory"),
)
_PLAN = ("planned_bytes", "arena_bytes", "extra_bytes")


def make(rates: Mapping | None) -> dict:
    """The report as a dictionary; see trainstream.report.

    Args:
        rates: Of this machine, as trainstream.hardware keeps them; None: not known.
    """
    state = _switch.current()
    if state is None:
        return {"enabled": False}
    stats = state.extension.stats()
    report = {
        "enabled": True,
        "device": state.device,
        "steps": stats.get("steps", 0),
        "plan": {key: stats.get(key, 0) for key in ("plans", "strays")},
    }
    step = _usual_step(state.extension, rates)
    # The last plan's: the model may be gone by now, and its plan with it.
    report["plan"].update({key: (step or {}).get(key, 0) for key in _PLAN})
    if step is not None:
        report.update(_of_step(step, rates))
    return report


def known_rates() -> dict | None:
    """What was measured on this machine before; measures nothing."""
    from trainstream import hardware

    with suppress(Exception):  # No device, or none that answers.
        return hardware.kept_rates()
    return None


def measured_rates() -> dict:
    """Measures if need be; raises as trainstream.profile_hardware does."""
    from trainstream import hardware

    return dataclasses.asdict(hardware.profile(refresh=False))


def known() -> dict | None:
    """The report, if a step was measured; with a bound where this machine's rates are known."""
    state = _switch.current()
    if state is None or not state.extension.usual_steps(0.0, 0.0, 0.0, 0.0):
        return None
    return make(known_rates())


def _usual_step(extension, rates: Mapping | None) -> dict | None:
    """Of the device whose steps take longest; None where none was measured."""
    link = (0.0, 0.0, 0.0, 0.0)
    if rates is not None:
        link = tuple(
            rates[key][way] for key in ("alone", "both") for way in ("to_device", "to_host")
        )
    steps = extension.usual_steps(*link)
    return max(steps, key=lambda step: step["step_ns"], default=None)


def _of_step(step: dict, rates: Mapping | None) -> dict:
    cores, kernel = _optimizer_traffic()
    # What is used in place is not counted: how much of it an operator touches is not known. A
    # kernel over host memory reads half of what it touches, and writes the other half.
    traffic = bound.Traffic(
        step["to_device_bytes"] + kernel // 2,
        step["to_host_bytes"] + kernel // 2,
        cores,
    )
    forecast_ns = step.get("forecast_ns")
    result = {
        "step_seconds": step["step_ns"] / 1e9,
        "compute_seconds": step["compute_ns"] / 1e9,
        "stall_seconds": {key: step[name] / 1e9 for name, key, _ in _STALLS},
        "predicted_seconds": None if forecast_ns is None else forecast_ns / 1e9,
        "bytes": {
            "to_device": step["to_device_bytes"],
            "to_host": step["to_host_bytes"],
            "in_place": step["in_place_bytes"],
            "optimizer_cores": cores,
            "optimizer_kernel": kernel,
        },
        "bound": None,
        "bound_seconds": None,
        "limit": None,
    }
    if rates is not None:
        values = bound.terms(result["compute_seconds"], traffic, rates)
        limit = bound.largest(values)
        result.update(bound=values, bound_seconds=values[limit], limit=limit)
    return result


def _optimizer_traffic() -> tuple[int, int]:
    """Bytes of host memory that trainstream.optim's last steps touched: by cores, by a kernel."""
    every = [getattr(optimizer, "traffic", (0, 0)) for optimizer in _step.stepped_optimizers()]
    return sum(cores for cores, _ in every), sum(kernel for _, kernel in every)


def as_text(report: dict) -> str:
    """The report as lines for a person."""
    if not report["enabled"]:
        return "trainstream is off: nothing is moved, and nothing is measured"
    plan = report["plan"]
    lines = [f"trainstream: {report['steps']} steps on {report['device']}"]
    lines.append(
        _plan_text(plan) if plan["plans"] else "plan: none; what is needed comes on demand"
    )
    if "step_seconds" not in report:
        lines.append("step: not measured; it fits, or no optimizer made two steps under pressure")
        return "\n".join(lines)
    took, predicted = report["step_seconds"], report["predicted_seconds"]
    words = f"step: {format_seconds(took)}"
    if predicted is not None:
        words += f", predicted {format_seconds(predicted)} ({predicted / max(took, 1e-9):.0%})"
    lines.append(words)
    waited = sum(report["stall_seconds"].values())
    lines.append(
        f"  compute {format_seconds(report['compute_seconds'])}, waited {_share(waited, took)}"
    )
    for _, key, why in _STALLS:
        if report["stall_seconds"][key]:
            lines.append(f"    {_share(report['stall_seconds'][key], took)}: {why}")
    moved = report["bytes"]
    lines.append(
        "  " + ", ".join(f"{key} {format_bytes(size)}" for key, size in moved.items() if size)
    )
    lines.append(bound.limit_text(report))
    return "\n".join(lines)


def _plan_text(plan: dict) -> str:
    planned, arena = (format_bytes(plan[key]) for key in ("planned_bytes", "arena_bytes"))
    text = f"plan: {planned} pass through {arena} of frames"
    if plan["extra_bytes"]:
        text += f", {format_bytes(plan['extra_bytes'])} more for parts of the step"
    return text + f"; made {plan['plans']} times, {plan['strays']} uses outside it"


def _share(seconds: float, of_seconds: float) -> str:
    return f"{format_seconds(seconds)} ({seconds / max(of_seconds, 1e-9):.1%})"
