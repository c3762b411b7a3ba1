"""The short form of the random walk over real tensors; `make soak` runs it at length."""

import os
import pathlib
import random
import subprocess
import sys

import pytest

WALK = pathlib.Path(__file__).with_name("walk.py")
SHORT, LONG = "600", "100000"
DEFAULT = LONG if os.environ.get("TRAINSTREAM_SOAK") else SHORT
OPERATIONS = int(os.environ.get("TRAINSTREAM_WALK_OPERATIONS", DEFAULT))


def run_walk(device, *options, seed=None):
    seed = seed if seed is not None else random.SystemRandom().randrange(2**31)
    command = [sys.executable, str(WALK), "--device", device, "--seed", str(seed), *options]
    root = str(WALK.parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "no difference" in output, output
    return output


@pytest.mark.parametrize("threads", ["1", "3"])
def test_random_walk_equals_its_numpy_twins(threads):
    run_walk("sim", "--operations", str(OPERATIONS), "--threads", threads)


def test_random_walk_with_refused_copies_equals_its_numpy_twins():
    output = run_walk("sim", "--operations", str(OPERATIONS), "--faults")
    assert "moves refused 0" not in output, output


@pytest.mark.gpu
def test_random_walk_on_a_gpu_equals_its_numpy_twins():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    run_walk("cuda", "--operations", str(OPERATIONS), "--threads", "2")
