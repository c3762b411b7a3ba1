"""A run report as one HTML page that needs no network and no script: its charts are inline SVG."""

import html
import math
from dataclasses import dataclass

from trainstream._text import format_bytes, format_seconds
from trainstream.cli import panels, run_file
from trainstream.cli.panels import Panel, Series

_WIDTH, _HEIGHT = 640, 250  # In the units of an SVG's view box.
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 14, 12, 30
_TIPS_MAX = 200  # Places to point at in one chart.

_STYLE = """
:root { --ink: #1d2129; --soft: #5a6270; --grid: #e3e6ea; --paper: #ffffff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaee; --soft: #a3abb8; --grid: #363c46; --paper: #16191e; --card: #1f242b; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 24px 48px; max-width: 1360px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 0; }
p { margin: 4px 0; } .soft { color: var(--soft); font-size: 13px; }
.limit { font-size: 17px; margin: 18px 0; padding: 14px 18px; background: var(--card);
  border-left: 4px solid #0072B2; border-radius: 4px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; }
.tile { background: var(--card); border-radius: 6px; padding: 10px 14px; }
.tile b { display: block; font-size: 19px; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr));
  gap: 26px 30px; margin: 26px 0; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 12px; fill: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; margin: 2px 0 4px; }
.legend i { display: inline-block; width: 14px; height: 10px; margin-right: 6px; }
.legend i.line { height: 0; border-top: 3px solid; vertical-align: middle; }
.legend i.dashed { border-top-style: dashed; }
.tip { fill: transparent; } .tip:hover { fill: var(--ink); fill-opacity: 0.08; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--grid); }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); }
.tables { display: flex; flex-wrap: wrap; gap: 28px 60px; }
"""


def make(run: run_file.Run) -> str:
    """The whole page."""
    script = html.escape(str(run.raw.get("script", "")) or "a run")
    drawn = [panel for panel in panels.of(run) if not panel.is_empty()]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>trainstream: {script}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{script}</h1>",
            f'<p class="soft">{_heading(run)}</p>',
            f'<p class="limit">{html.escape(run_file.limit(run))}</p>',
            _tiles(run),
            '<div class="charts">',
            *(_figure(panel) for panel in drawn),
            "</div>",
            '<div class="tables">',
            _memory_table(run),
            _settings_table(run),
            "</div></body></html>",
            "",
        ]
    )


def _heading(run: run_file.Run) -> str:
    versions = run.raw.get("versions", {})
    parts = [str(run.raw.get("device_name", "")), str(run.raw.get("began", "")).replace("T", " ")]
    parts += [f"{name} {version}" for name, version in versions.items()]
    if run.raw.get("rank"):
        parts.append(f"rank {run.raw['rank']}")
    if not run.raw.get("finished"):
        parts.append("not finished when this was written")
    return html.escape(" · ".join(part for part in parts if part))


def _tiles(run: run_file.Run) -> str:
    skipped = ("script", "device")
    tiles = [
        f'<div class="tile"><span class="soft">{html.escape(what)}</span>'
        f"<b>{html.escape(value)}</b></div>"
        for what, value in run_file.summary(run)
        if what not in skipped
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _figure(panel: Panel) -> str:
    return "\n".join(
        [
            f'<figure style="margin:0"><h2>{html.escape(panel.title)}</h2>',
            f'<p class="soft">{html.escape(panel.note)}</p>',
            _legend(panel),
            _Drawing(panel).svg(),
            "</figure>",
        ]
    )


def _ink(colour: str) -> str:
    return "var(--ink)" if colour == "ink" else colour


def _legend(panel: Panel) -> str:
    entries = [(series, f"background:{_ink(series.colour)}", "") for series in panel.stacked]
    for series in panel.lines:
        kind = "line dashed" if series.dashed else "line"
        entries.append((series, f"border-color:{_ink(series.colour)}", kind))
    spans = (
        f'<span><i class="{kind}" style="{style}"></i>{html.escape(series.name)}</span>'
        for series, style, kind in entries
    )
    return f'<div class="legend">{"".join(spans)}</div>'


@dataclass(frozen=True)
class Scale:
    """A chart's vertical axis.

    Args:
        areas: (series, lower edge, upper edge) from the bottom up.
        highest: The axis's end.
        cut: What to say of a first step that sticks out of it; "" where none does.
        unit_name, unit: "MiB", 2**20: what the axis counts in.
        ticks: Round numbers of that unit.
    """

    areas: list[tuple[Series, list[float], list[float]]]
    highest: float
    cut: str
    unit_name: str
    unit: float
    ticks: list[float]


def scale_of(panel: Panel) -> Scale:
    """The axis that a chart of this panel has, whoever draws it."""
    areas = _stack(panel.stacked)
    tops = [value for _, _, upper in areas for value in upper]
    highest, cut = _highest(panel.lines, max(tops, default=0))
    (name, unit), ticks = _ticks(highest, panel.unit)
    return Scale(areas, highest, cut, name, unit, ticks)


class _Drawing:
    """One chart's scales and marks."""

    def __init__(self, panel: Panel):
        self._panel = panel
        every = [*panel.stacked, *panel.lines]
        steps = [step for series in every for step in series.steps]
        self._first, self._last = min(steps), max(max(steps), min(steps) + 1)
        self._scale = scale_of(panel)

    def svg(self) -> str:
        label = html.escape(self._panel.title)
        parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">']
        parts += self._grid()
        for series, lower, upper in self._scale.areas:
            points = list(zip(series.steps, upper, strict=True))
            points += list(zip(series.steps, lower, strict=True))[::-1]
            drawn = self._points(points)
            parts.append(f'<polygon points="{drawn}" fill="{_ink(series.colour)}" opacity="0.85"/>')
        parts += [self._polyline(series) for series in self._panel.lines]
        if self._scale.cut:
            parts.append(
                f'<text x="{_WIDTH - _RIGHT}" y="{_TOP + 12}" text-anchor="end">'
                f"{html.escape(self._scale.cut)}</text>"
            )
        return "".join([*parts, *self._tips(), "</svg>"])

    def _x(self, step: float) -> float:
        share = (step - self._first) / (self._last - self._first)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        share = min(value / self._scale.highest, 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def _points(self, points: list[tuple[int, float]]) -> str:
        return " ".join(f"{self._x(step):.1f},{self._y(value):.1f}" for step, value in points)

    def _polyline(self, series: Series) -> str:
        dashes = ' stroke-dasharray="6 4"' if series.dashed else ""
        points = list(zip(series.steps, series.values, strict=True))
        if len(points) == 1:  # A line of one point shows nothing.
            points = [points[0], (self._last, points[0][1])]
        return (
            f'<polyline points="{self._points(points)}" fill="none" stroke-width="2" '
            f'stroke-linejoin="round" stroke="{_ink(series.colour)}"{dashes}/>'
        )

    def _grid(self) -> list[str]:
        parts = []
        for value in self._scale.ticks:
            y = self._y(value * self._scale.unit)
            text = f"{value:g} {self._scale.unit_name}".strip()
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="var(--grid)"/><text x="{_LEFT - 8}" y="{y + 4:.1f}" '
                f'text-anchor="end">{text}</text>'
            )
        for step in _step_ticks(self._first, self._last):
            parts.append(
                f'<text x="{self._x(step):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">'
                f"{step}</text>"
            )
        parts.append(f'<text x="{_LEFT - 8}" y="{_HEIGHT - 10}" text-anchor="end">step</text>')
        return parts

    def _tips(self) -> list[str]:
        """Invisible columns that say their step's numbers when pointed at."""
        every = [*self._panel.stacked, *self._panel.lines]
        values = [dict(zip(series.steps, series.values, strict=True)) for series in every]
        steps = sorted(set().union(*values))
        steps = steps[:: math.ceil(len(steps) / _TIPS_MAX)]
        width = (_WIDTH - _LEFT - _RIGHT) / max(len(steps), 1)
        parts = []
        for step in steps:
            lines = [f"step {step}"]
            for series, known in zip(every, values, strict=True):
                if step in known:
                    lines.append(f"{series.name}: {_value_text(known[step], self._panel.unit)}")
            x = min(max(self._x(step) - width / 2, _LEFT), _WIDTH - _RIGHT - width)
            parts.append(
                f'<rect class="tip" x="{x:.1f}" y="{_TOP}" width="{width:.1f}" '
                f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{html.escape(chr(10).join(lines))}'
                "</title></rect>"
            )
        return parts


def _stack(stacked: list[Series]) -> list[tuple[Series, list[float], list[float]]]:
    """(series, lower edge, upper edge) from the bottom up; all have the same steps."""
    made, below = [], None
    for series in stacked:
        lower = below or [0.0] * len(series.values)
        below = [a + b for a, b in zip(lower, series.values, strict=True)]
        made.append((series, lower, below))
    return made


def _highest(lines: list[Series], highest: float) -> tuple[float, str]:
    """The chart's upper end, and what to say where a first step sticks out of it: that one makes
    states and a plan, and would flatten all others.
    """
    cut = ""
    for series in lines:
        later = series.values[2:]
        top = max(series.values, default=0)
        if later and series.values[0] > 3 * max(later) > 0 and series.name == "step":
            cut = f"the first took {format_seconds(series.values[0])}"
            top = 1.3 * max(later)
        highest = max(highest, top)
    return 1.08 * (highest or 1), cut


_UNITS = {
    "bytes": [(n, 1024**i) for i, n in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))],
    "seconds": [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)],
    "count": [("", 1.0)],
}


def _ticks(highest: float, kind: str) -> tuple[tuple[str, float], list[float]]:
    """The unit, and about five round numbers of it from 0 to `highest`."""
    unit = next((u for u in reversed(_UNITS[kind]) if highest >= u[1]), _UNITS[kind][0])
    most = highest / unit[1]
    rough = max(most / 5, 1 if kind == "count" else 0)
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    return unit, [round(i * step, 10) for i in range(int(most / step) + 1)]


def _step_ticks(first: int, last: int) -> list[int]:
    gap = max(1, math.ceil((last - first) / 8))
    power = 10 ** max(0, math.floor(math.log10(gap)))
    gap = next(m * power for m in (1, 2, 5, 10) if m * power >= gap)
    return [step for step in range(0, last + 1, gap) if step >= first]


def _value_text(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(int(value))
    return format_seconds(value) if unit == "seconds" else f"{value:g}"


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    def cells(row: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    body = "".join(cells(row, "td") for row in rows)
    thead = f"<thead>{cells(head, 'th')}</thead>" if head else ""
    return f"<div><h2>{html.escape(title)}</h2><table>{thead}<tbody>{body}</tbody></table></div>"


def _memory_table(run: run_file.Run) -> str:
    if not run.samples:
        return ""
    places = {
        "device": "device",
        "host_pinned": "host, locked",
        "host_pageable": "host, pageable",
        "host_copies": "host copies",
    }
    step, _, now = run.samples[-1]
    rows = []
    for kind in run_file.KINDS:
        row = now.get(kind, {})
        rows.append([kind, *(format_bytes(row.get(place, 0)) for place in places)])
    return _table(f"Memory at the end of step {step}", ["", *places.values()], rows)


def _setting(text: str) -> str:
    return format_bytes(int(text)) if text.isdecimal() and len(text) > 3 else text


def _settings_table(run: run_file.Run) -> str:
    rows = [[str(key), _setting(str(value))] for key, value in run.raw.get("config", {}).items()]
    return _table("Settings", [], rows)
