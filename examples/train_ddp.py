"""Trains the GPT of train_gpt.py on several GPUs, or CPU processes, with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train_ddp.py --steps 20

Plain PyTorch. Every rank has the whole model and reads bytes of its own; gradients are averaged.
Rank 0 prints its losses to the last bit.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, draw_batch, read_corpus


def train(model: nn.Module, options: argparse.Namespace) -> list[float]:
    """Runs the steps and returns this rank's losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    corpus = read_corpus()
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        inputs, targets = draw_batch(corpus, options.batch, options.context, generator)
        logits = model(inputs.to(options.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(options.device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}/{options.steps} loss {losses[-1]}", flush=True)
    return losses


def parse_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, of each rank")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse_command_line()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    torch.use_deterministic_algorithms(True)  # So that two runs can be compared.
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.heads, options.context).to(options.device)
    train(DistributedDataParallel(model), options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
