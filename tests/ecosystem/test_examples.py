"""The examples for torchrun, each rank at half its peak: losses and weights of every rank."""

import pytest
import torch
from matrix import ecosystem
from real_runner import DEVICES
from script_runner import ROOT
from test_distributed import run_cell_of_ranks

pytest.importorskip("tqdm")
pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp2"])
def test_example_for_torchrun(tmp_path, device, name):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL asks for a GPU for each rank")
    script = f"""
sys.path.insert(0, {str(ROOT / "examples")!r})
import {name} as example

train = example.train

def train_and_show(model, options):
    losses = train(model, options)
    show(losses, [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])

example.train = train_and_show
example.read_corpus = lambda: torch.arange(4096).mul(31).remainder(251).to(torch.uint8)
sys.argv[1:] = ["--device", DEVICE, "--width", str(WIDTH), "--steps", "5", "--context", "32"]
sys.argv += ["--layers", "3"]
example.main()
"""
    run_cell_of_ranks(tmp_path, script, device, world=2)
