"""Cells of the ecosystem matrix: a real script, stock and under a share of its own stock peak.

A cell's script is what a user would write. It sees what tests/real_runner.py gives it, and
`show(*values)`, whose lines are compared: floats as hexadecimal, tensors, modules and optimizers as
digests of their bytes. Other output (times, progress) is the script's own. `WIDTH` is how wide its
models should be: storages of kilobytes are managed where CPU tensors play the device's.

With TRAINSTREAM_ECOSYSTEM=long each script starts a Python of its own, as a user's does, where
otherwise it is forked from one that has imported the libraries; and it takes more steps (`LONG`).
With TRAINSTREAM_MATRIX=<file> each cell that was shown adds its numbers there, one JSON object a
line, for tools/compatibility.py.
"""

import json
import os
import pathlib
import re
import textwrap
from dataclasses import dataclass

import pytest
from real_runner import BY_OPTIMIZERS, exit_numbers, needs_extension, run_real
from script_runner import Result

LONG = os.environ.get("TRAINSTREAM_ECOSYSTEM") == "long"

long_form = pytest.mark.skipif(not LONG, reason="of the long form")
ecosystem = [pytest.mark.ecosystem, needs_extension]

PRELUDE = """
LONG = {long}
WIDTH = 128 if DEVICE == "cpu" else 1024

def show(*values):
    # One write, so that the lines of several processes do not mix.
    sys.stdout.write("= " + " ".join(_shown(value) for value in values) + "\\n")
    sys.stdout.flush()

def _shown(value):
    if isinstance(value, torch.nn.Module):
        return _shown(dict(value.state_dict()))
    if isinstance(value, torch.optim.Optimizer):
        return _shown(value.state_dict()["state"])
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, dict):
        text = repr([(key, _shown(each)) for key, each in value.items()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(map(_shown, value)) + "]"
    return str(value)

"""
EPILOGUE = """
if DEVICE == "cuda" and _C is None:
    print("stock peak", torch.cuda.max_memory_allocated(), file=sys.stderr)
"""


@dataclass
class Shown:
    """What a cell showed: `lines` of its script, and numbers of its tight run's exit line."""

    lines: list[str]
    stock_peak_bytes: int
    budget_bytes: int
    numbers: dict[str, int]


def run_cell(
    folder: pathlib.Path,
    script: str,
    *,
    device: str,
    share: float = 0.45,
    preload: tuple[str, ...] = BY_OPTIMIZERS,
    moves: bool = True,
    keys: str = "",
    processes: int = 1,
    **options,
) -> Shown:
    """Runs `script` stock, with room, and under a budget; all must show the same.

    Args:
        share: The budget, as a share of the peak of the stock script.
        preload: What a process that scripts are forked from has imported; see run_real.
        moves: Whether the budget must have made something leave. Default True.
        keys: More of the configuration of the tight run, such as ",plan:off".
        processes: How many are switched on, spawned ones included. The script's own ends last.
        options: As run_real's.
    """
    text = PRELUDE.format(long=LONG) + textwrap.dedent(script) + EPILOGUE
    options = {"fresh": LONG or device == "cuda", "seconds": 300, **options, "preload": preload}
    small = ",min_storage:4KiB" if device == "sim" else ""

    def run(conf: str | None) -> Result:
        return run_real(folder, text, conf, device=device, **options)

    stock = run(None)
    expected = shown_lines(stock)
    assert expected, f"a script that shows nothing compares nothing\n{stock.stderr}"
    if device == "sim":
        roomy = run("vram:64GiB" + small)
        assert shown_lines(roomy) == expected, roomy.stderr
        peak = last_numbers(roomy, processes)["peak"]
    else:
        peak = stock_peak(stock)
    budget = int(peak * share)
    tight = run(f"vram:{budget},verify:1{small}{keys}")
    assert shown_lines(tight) == expected, tight.stderr
    numbers = last_numbers(tight, processes)
    assert numbers["evicted"] > 0 or not moves, tight.stderr
    assert device != "sim" or numbers["peak"] <= budget, tight.stderr
    assert "written without being" not in tight.stderr, tight.stderr
    check_host_memory(numbers, peak)
    shown = Shown(expected, peak, budget, numbers)
    note(device, share, shown)
    return shown


def shown_lines(result: Result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("= ")]


def stock_peak(result: Result) -> int:
    """Of all processes of a script, the one that trains: workers may say theirs, too."""
    return max(map(int, re.findall(r"stock peak (\d+)", result.stderr)))


def last_numbers(result: Result, processes: int) -> dict[str, int]:
    """The numbers of the last process's exit line, of `processes` such lines."""
    lines = [line for line in result.lines() if "evicted=" in line]
    assert len(lines) == processes, result.stderr
    return exit_numbers(Result(result.status, "", lines[-1]))


def check_host_memory(numbers: dict[str, int], peak: int) -> None:
    """What stock had at its peak fits in host memory twice, cut into slabs: nothing piles up."""
    assert numbers["pinned"] <= 2 * peak + (32 << 20), numbers


def note(device: str, share: float, shown: Shown) -> None:
    """Adds the cell's numbers to the file that TRAINSTREAM_MATRIX names."""
    path = os.environ.get("TRAINSTREAM_MATRIX")
    if not path:
        return
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    row = {
        "test": test,
        "device": device,
        "share": share,
        "stock_peak_bytes": shown.stock_peak_bytes,
        "budget_bytes": shown.budget_bytes,
        **shown.numbers,
    }
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
