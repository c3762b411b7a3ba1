"""Trains examples/train_gpt.py stock, then under 40 % of its own peak, and compares the two.

    python tools/demo.py [--device cuda|sim] [--steps N] [--percent 40]

On a GPU where there is one; elsewhere the simulated device, where CPU tensors play the device's.
Each run is a process of its own, and neither knows of trainstream but by environment variables.
Exit status: 0 when losses and weights are equal bit for bit, something was evicted, and the budget
was within 40 % of stock's peak; 1 otherwise.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"
PERCENT_MAX = 40
MIB = 2**20

# (weights + gradients + two moments) x 4 B: 19 M parameters are 0.3 GiB and the steps take a minute
# or so on two slow cores; 340 M are 5 GiB, with activations on top.
MODELS = {
    "sim": {"steps": 20, "layers": 6, "width": 512, "heads": 8, "batch": 4, "context": 128},
    "cuda": {"steps": 40, "layers": 12, "width": 1536, "heads": 12, "batch": 16, "context": 512},
}
# Holds all of the simulated model. Only address space until it is used.
ROOMY = "8GiB"


@dataclass
class Run:
    """What one run of the script gave.

    Args:
        result: The JSON that the script wrote.
        summary: The fields of trainstream's exit line, as text; empty for a stock run.
        wall_s: Seconds from start to end, start-up included.
    """

    result: dict
    summary: dict[str, str]
    wall_s: float

    def bytes_of(self, field: str) -> int:
        return int(self.summary[field])


class DemoError(Exception):
    """A run failed, so that there is nothing to compare. The text says what it printed."""


def run_script(progress: Progress, title: str, device: str, steps: int, conf: str | None) -> Run:
    """Runs the script; stock where `conf` is None, else with trainstream switched on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTORCH_TRAINSTREAM")}
    # The clone holds the entry point that `import torch` looks for, in trainstream.egg-info.
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if conf is not None:
        environment.update(PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF=conf)
    with tempfile.TemporaryDirectory() as folder:
        losses = pathlib.Path(folder) / "losses.json"
        arguments = {**MODELS[device], "steps": steps, "losses": losses}
        arguments["device"] = "cuda" if device == "cuda" else "cpu"
        command = [sys.executable, str(SCRIPT)]
        command += [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        start = time.perf_counter()
        said, status = watch(progress, title, steps, command, environment)
        wall_s = time.perf_counter() - start
        if status != 0:
            raise DemoError(f"{title}: the script ended with status {status}\n" + "".join(said))
        result = json.loads(losses.read_text(encoding="utf-8"))
    return Run(result, read_summary(title, said) if conf is not None else {}, wall_s)


def watch(
    progress: Progress, title: str, steps: int, command: list[str], environment: dict[str, str]
) -> tuple[list[str], int]:
    """Shows the steps as the script reports them; returns its stderr lines and its status."""
    bar = progress.add_task(title, total=steps, loss="")
    said = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            match = re.match(r"step (\d+)/\d+ loss (\S+)", line)
            if match:
                progress.update(bar, completed=int(match[1]), loss=f"loss {match[2]}")
            else:
                said.append(line)
    return said, process.returncode


def read_summary(title: str, said: list[str]) -> dict[str, str]:
    """The fields of the exit line."""
    lines = [line for line in said if line.startswith("trainstream: ") and "evicted=" in line]
    if len(lines) != 1:
        hint = "trainstream was not switched on; build it first: make build"
        raise DemoError(f"{title}: {hint}\n" + "".join(said))
    return dict(field.split("=", 1) for field in lines[0].split()[1:])


def run_all(options: argparse.Namespace, console: Console) -> tuple[int, Run, Run]:
    """The stock run's peak in bytes, the stock run, and the run under a budget."""
    columns = [TextColumn("{task.description:<28}"), BarColumn()]
    columns += [TextColumn("{task.completed}/{task.total} steps"), TimeElapsedColumn()]
    columns += [TextColumn("{task.fields[loss]}")]
    device, steps = options.device, options.steps
    with Progress(*columns, console=console) as progress:
        stock = run_script(progress, "stock", device, steps, None)
        peak_bytes = stock.result["peak_bytes"] or measure_peak(progress, device)
        conf = f"vram:{peak_bytes * options.percent // 100},device:{device}"
        small = run_script(progress, f"under {options.percent} % of that", device, steps, conf)
    return peak_bytes, stock, small


def measure_peak(progress: Progress, device: str) -> int:
    """Live bytes at the peak of a run that fits, which torch does not count on the CPU.

    Storages under 1 MiB are not counted, so the figure is a little low and the budget a little
    tighter. The optimizer's state exists from the first step on: two steps have seen everything.
    """
    conf = f"vram:{ROOMY},device:{device}"
    roomy = run_script(progress, "stock's peak (2 steps)", device, 2, conf)
    if roomy.bytes_of("evicted") > 0:
        raise DemoError(f"the model of the demo does not fit into {ROOMY}; enlarge ROOMY")
    return roomy.bytes_of("peak")


def verdicts(peak_bytes: int, stock: Run, small: Run) -> dict[str, bool]:
    """What the demo claims, and whether it holds."""
    same = [stock.result[key] == small.result[key] for key in ("losses", "weights_sha256")]
    within = small.bytes_of("budget") * 100 <= PERCENT_MAX * peak_bytes
    return {
        "losses bit-equal": same[0],
        "final weights bit-equal": same[1],
        f"budget <= {PERCENT_MAX} % of stock's peak": within,
        "evicted > 0": small.bytes_of("evicted") > 0,
    }


def make_table(device: str, peak_bytes: int, stock: Run, small: Run) -> Table:
    """Both runs side by side; losses as decimal numbers with every digit that decides."""
    title = "simulated device (CPU tensors)" if device == "sim" else "GPU"
    millions = stock.result["parameters"] / 1e6
    table = Table(title=f"GPT of {millions:.0f} M parameters, {title}", title_justify="left")
    table.add_column("")
    for heading in ("stock", "trainstream"):
        table.add_column(heading, justify="right")
    losses = [run.result["losses"] for run in (stock, small)]
    count = len(losses[0])
    for step in sorted({1, 2, *(count * part // 4 for part in (1, 2, 3)), count} - {0}):
        table.add_row(f"loss of step {step}", *(repr(float.fromhex(x[step - 1])) for x in losses))
    hashes = [run.result["weights_sha256"][:16] for run in (stock, small)]
    table.add_row("final weights, SHA-256", *hashes, end_section=True)
    budget_bytes = small.bytes_of("budget")
    share = f"{100 * budget_bytes / peak_bytes:.1f} %"
    table.add_row("peak", mebibytes(peak_bytes), mebibytes(small.bytes_of("peak")))
    table.add_row("budget", "-", mebibytes(budget_bytes))
    table.add_row("budget, of stock's peak", "-", share, end_section=True)
    table.add_row("time of the steps", *(f"{r.result['seconds']:.1f} s" for r in (stock, small)))
    table.add_row("time of the process", *(f"{r.wall_s:.1f} s" for r in (stock, small)))
    for field in ("evicted", "restored", "in_place"):
        end = field == "in_place"
        moved = mebibytes(small.bytes_of(field))
        table.add_row(field.replace("_", " "), "-", moved, end_section=end)
    for claim, holds in verdicts(peak_bytes, stock, small).items():
        table.add_row(claim, "", "[green]yes[/]" if holds else "[bold red]NO[/]")
    return table


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


def find_device() -> str:
    # In a process of its own: asking starts CUDA, which would hold memory during the runs.
    code = "import torch; print(torch.cuda.is_available())"
    environment = {**os.environ, "PYTORCH_TRAINSTREAM": "0"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    return "cuda" if b"True" in answer.stdout else "sim"


def parse_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "sim"), help="default: the GPU if there is one"
    )
    parser.add_argument("--steps", type=int, help="default: 20 on sim, 40 on a GPU")
    parser.add_argument("--percent", type=int, default=PERCENT_MAX, help="budget, of stock's peak")
    options = parser.parse_args()
    options.device = options.device or find_device()
    options.steps = options.steps or MODELS[options.device]["steps"]
    return options


def main() -> int:
    options, console = parse_command_line(), Console()
    try:
        peak_bytes, stock, small = run_all(options, console)
    except DemoError as fault:
        console.print(f"demo: {fault}", markup=False, style="red")
        return 1
    console.print(make_table(options.device, peak_bytes, stock, small))
    return 0 if all(verdicts(peak_bytes, stock, small).values()) else 1


if __name__ == "__main__":
    sys.exit(main())
