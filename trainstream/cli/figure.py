"""A run report as a PNG, drawn by matplotlib where that is installed: the page's charts."""

import textwrap

from trainstream import errors
from trainstream.cli import page, panels, run_file
from trainstream.cli.panels import Panel


def write(run: run_file.Run, path: str) -> None:
    """Draws the charts of a run, two in a row.

    Raises:
        TrainstreamError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure  # Not pyplot, which looks for a display.
    except ImportError:
        raise errors.needs_matplotlib() from None
    drawn = [panel for panel in panels.of(run) if not panel.is_empty()]
    rows = max(1, (len(drawn) + 1) // 2)
    figure = Figure(figsize=(12, 0.9 + 3.1 * rows), layout="constrained")
    title = textwrap.fill(run_file.limit(run), 110)
    figure.suptitle(f"{run.raw.get('script', '')}\n{title}", fontsize=11)
    for number, panel in enumerate(drawn):
        _draw(figure.add_subplot(rows, 2, number + 1), panel)
    figure.savefig(path, dpi=110, format="png")


def _draw(axes, panel: Panel) -> None:
    shown = page.scale_of(panel)
    for series, lower, upper in shown.areas:
        low, up = ([value / shown.unit for value in edge] for edge in (lower, upper))
        axes.fill_between(series.steps, low, up, color=series.colour, alpha=0.85, label=series.name)
    for series in panel.lines:
        axes.plot(
            series.steps,
            [value / shown.unit for value in series.values],
            color="black" if series.colour == "ink" else series.colour,
            linestyle="--" if series.dashed else "-",
            marker="o" if len(series.steps) == 1 else "",
            label=series.name,
        )
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.set_xlabel(f"step{', ' + shown.cut if shown.cut else ''}", fontsize=8)
    axes.set_ylabel(shown.unit_name, fontsize=8)
    axes.set_ylim(0, shown.highest / shown.unit)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    # Above the chart: areas leave no room in it.
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
        columnspacing=1,
        fontsize=7,
        frameon=False,
        ncols=5,
    )
