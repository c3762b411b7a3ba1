"""Operators on storages that are cold, or clean, when they begin: the same bits as plain, and no
write is lost when the storages leave once more.

The cases are in operator_cases.py, which runs them all in one process; each is a test here.
"""

import functools
import os
from dataclasses import dataclass, field

import operator_cases
import pytest
from real_runner import BY_OPTIMIZERS, needs_extension, on_gpu
from script_runner import run_script

pytestmark = needs_extension

# Small enough to be quick: all of a few KiB and more is managed. verify counts unnoticed writes.
CONF = {
    "sim": "device:sim,min_storage:1KiB,verify:1,vram:",
    "cuda": "device:cuda,min_storage:4KiB,verify:1,vram:",
}
# What the inputs are at the start is in operator_cases.py. "tight": cold, and there is room for few
# storages, so that evictions happen inside operators.
BUDGETS = {
    "sim": {"cold": "16MiB", "clean": "16MiB", "tight": "64KiB", "storm": "1MiB"},
    "cuda": {"cold": "256MiB", "clean": "256MiB", "tight": "48MiB", "storm": "96MiB"},
}


def has(protocol: str, name: str) -> bool:
    """Compiling takes seconds and its operators are those of other cases."""
    return name != "compiled" or protocol in ("cold", "storm")


SCRIPT = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import operator_cases
operator_cases.main()
"""


@dataclass
class Outcome:
    """What one case printed; `end` says how the process ended in it, if it did."""

    lines: list[str] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    end: str = ""


def run_cases(folder, device: str, protocol: str, conf: str | None, names: list[str]):
    """The outcome of each case. A case that ends the process does not take the rest with it."""
    outcomes = {}
    variables = {
        "DEVICE": "cpu" if device == "sim" else "cuda",
        "PROTOCOL": "cold" if protocol == "tight" else protocol,
    }
    if conf is not None:
        variables |= {"PYTORCH_TRAINSTREAM": "1", "PYTORCH_TRAINSTREAM_CONF": conf}
    while names:
        result = run_script(
            folder, SCRIPT, fake=False, preload=BY_OPTIMIZERS, CASES=",".join(names), **variables
        )
        name = None
        for line in result.stdout.splitlines():
            word, name, *rest = line.split()
            outcome = outcomes.setdefault(name, Outcome())
            if word == "inputs":
                outcome.inputs = [int(number) for number in rest]
            else:
                outcome.lines.append(line)
        if result.status == 0:
            break
        assert name is not None, result.stderr
        outcomes[name].end = f"status {result.status}\n{result.stderr[-2000:]}"
        names = names[names.index(name) + 1 :]
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A function from device and protocol to the outcomes plain and under trainstream.

    The plain ones come as a list of runs: one where all arithmetic is deterministic, more on a GPU,
    where atomics are not, to know the cases that have no bits to compare.
    """
    folder = tmp_path_factory.mktemp("operators")

    @functools.cache
    def plain_of(device: str):
        names = list(operator_cases.CASES)
        runs = 3 if device == "cuda" else 1
        return [run_cases(folder, device, "cold", None, names) for _ in range(runs)]

    @functools.cache
    def outcomes_of(device: str, protocol: str):
        names = [name for name in operator_cases.CASES if has(protocol, name)]
        conf = CONF[device] + BUDGETS[device][protocol]
        return plain_of(device), run_cases(folder, device, protocol, conf, names)

    return outcomes_of


@pytest.mark.parametrize(
    ("protocol", "name"),
    [(p, name) for p in BUDGETS["sim"] for name in operator_cases.CASES if has(p, name)],
)
@pytest.mark.parametrize("device", ["sim", on_gpu("cuda")])
def test_bits_are_those_of_the_plain_run(outcomes, device, protocol, name):
    plain_runs, under_run = outcomes(device, protocol)
    plain, under = plain_runs[0][name], under_run[name]
    assert plain.end == "" and under.end == ""
    if plain.lines[-1].startswith("skip"):
        pytest.skip("this case is for the other device")
    assert not any(line.startswith("raised") for line in plain.lines), plain.lines
    if any(run[name].lines != plain.lines for run in plain_runs):
        pytest.skip("plain runs differ among themselves")
    assert under.lines == plain.lines
    managed, there = under.inputs
    assert managed > 0 and (there == managed or protocol == "storm")
