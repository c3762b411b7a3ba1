"""The demo: what makes it fail, and that the script it runs is plain PyTorch."""

import importlib.util

import pytest
from script_runner import ROOT

pytestmark = pytest.mark.any_torch

LOSSES, WEIGHTS = ["0x1.0p+0", "0x1.8p-1"], "ab" * 32


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("rich")
    spec = importlib.util.spec_from_file_location("demo", ROOT / "tools" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(demo, losses=LOSSES, weights=WEIGHTS, budget=400, evicted=7):
    result = {"losses": losses, "weights_sha256": weights, "seconds": 1.0, "parameters": 10**6}
    line = f"trainstream: device=sim budget={budget} peak=9 evicted={evicted} restored=1 in_place=0"
    return demo.Run(result, demo.read_summary("run", ["noise\n", line + "\n"]), wall_s=2.0)


@pytest.mark.parametrize(
    ("difference", "fails"),
    [
        ({}, []),
        ({"losses": ["0x1.0p+0", "0x1.8000000000001p-1"]}, ["losses bit-equal"]),
        ({"weights": "cd" * 32}, ["final weights bit-equal"]),
        ({"budget": 401}, ["budget <= 40 % of stock's peak"]),
        ({"evicted": 0}, ["evicted > 0"]),
    ],
)
def test_each_broken_claim_is_found(demo, difference, fails):
    runs = run_of(demo), run_of(demo, **difference)
    got = demo.verdicts(1000, *runs)
    assert [claim for claim, holds in got.items() if not holds] == fails
    demo.make_table("sim", 1000, *runs)


def test_run_without_exit_line_says_how_to_build(demo):
    with pytest.raises(demo.DemoError, match="(?s)make build.*off: no GPU"):
        demo.read_summary("run", ["trainstream: off: no GPU\n"])


def test_examples_are_plain_pytorch():
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")]
    assert texts and not any("trainstream" in text.lower() for text in texts)
