"""The short form of the random walk over real tensors; `make soak` runs it at length.

TRAINSTREAM_WALK_OPERATIONS sets how many operations each walk has.
"""

import os
import random

import pytest
from real_runner import needs_extension, on_gpu
from script_runner import ROOT, run_script

pytestmark = needs_extension

SHORT, LONG = 2000, 100_000
LONG_ON_GPU = 10_000
SOAK = bool(os.environ.get("TRAINSTREAM_SOAK"))


def walk(folder, device: str, *options: str, operations: int) -> str:
    """Runs tests/walk.py in a process of its own. Returns what it printed; the seed comes first."""
    seed = random.SystemRandom().randrange(2**31)
    operations = int(os.environ.get("TRAINSTREAM_WALK_OPERATIONS", operations))
    arguments = ["--device", device, "--seed", str(seed), "--operations", str(operations), *options]
    script = f"""
import runpy, signal, sys
signal.alarm({30 + operations})
sys.argv = ["walk.py", *{arguments!r}]
runpy.run_path({str(ROOT / "tests" / "walk.py")!r}, run_name="__main__")
"""
    result = run_script(folder, script, fake=False)
    output = result.stdout + result.stderr
    assert result.status == 0 and "no difference" in output, output
    return output


@pytest.mark.parametrize(
    "options",
    [
        ["--threads", "1", "--verify"],
        ["--threads", "3", "--storm"],
        ["--threads", "2", "--faults"],
        ["--threads", "1", "--ram", "600KiB"],
    ],
    ids=lambda options: " ".join(options).replace("-", ""),
)
def test_random_walk_equals_its_numpy_twins(tmp_path, options):
    output = walk(tmp_path, "sim", "--small", *options, operations=LONG if SOAK else SHORT)
    assert ("moves refused 0" not in output) == ("--faults" in options), output
    assert ("memory exhausted 0" not in output) == ("--ram" in options), output


@pytest.mark.parametrize("device", ["sim", on_gpu("cuda")])
def test_random_walk_over_storages_of_megabytes_equals_its_numpy_twins(tmp_path, device):
    operations = LONG_ON_GPU if SOAK else SHORT // 10
    walk(tmp_path, device, "--threads", "2", operations=operations)
