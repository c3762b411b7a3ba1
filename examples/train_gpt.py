"""Trains a small GPT, byte by byte, on the source text of Python's own standard library.

    python examples/train_gpt.py --steps 40 --losses out.json

Plain PyTorch. The same arguments on the same machine give the same bits: seeds, thread count and
algorithms are fixed. `out.json` then holds the losses as exact hexadecimal floats, the SHA-256 of
the final weights, the peak of live device bytes (null on the CPU, where torch does not count) and
the seconds that the steps took.
"""

import argparse
import ctypes
import hashlib
import json
import os
import pathlib
import sys
import sysconfig
import time

# cuBLAS reads this once, when torch starts it; without it, it may add in any order.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

BYTE_VALUES = 256


class Block(nn.Module):
    """One transformer layer: causal attention, then a feed-forward net, both around residuals.

    Args:
        width: Size of a token's vector; a multiple of `heads`.
        heads: Number of attention heads.

    Input and output: (batch, context, width).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        by_head = self.query_key_value(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = by_head.permute(2, 0, 3, 1, 4)  # Each (batch, heads, context, size).
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        layers, width, heads: As of `Block`.
        context: Longest input, in bytes.

    Input: (batch, context) bytes as int64. Output: (batch, context, 256) logits.
    """

    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTE_VALUES, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTE_VALUES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.byte_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_corpus() -> torch.Tensor:
    """All source files of the standard library, one after another, as uint8 on the CPU."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    # What is installed beside the library, and its tests, differ from machine to machine.
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    paths = [p for p in folder.rglob("*.py") if left_out.isdisjoint(p.relative_to(folder).parts)]
    text = b"".join(path.read_bytes() for path in sorted(paths))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batch(corpus: torch.Tensor, batch: int, context: int, generator: torch.Generator):
    """Random windows of the corpus: inputs and the bytes that follow, (batch, context) int64."""
    starts = torch.randint(len(corpus) - context, (batch, 1), generator=generator)
    windows = corpus[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def train(model: GPT, corpus: torch.Tensor, options: argparse.Namespace) -> list[float]:
    """Runs the steps and returns their losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    generator = torch.Generator().manual_seed(options.seed)
    losses: list[float] = []
    bar = tqdm(total=options.steps, unit="step", disable=not sys.stderr.isatty())
    for step in range(1, options.steps + 1):
        inputs, targets = draw_batch(corpus, options.batch, options.context, generator)
        logits = model(inputs.to(options.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(options.device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.4f}", refresh=False)
        bar.update()
        if bar.disable and (step % max(1, options.steps // 20) == 0 or step == options.steps):
            print(f"step {step}/{options.steps} loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    bar.close()
    return losses


def hash_of_weights(model: GPT) -> str:
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        raw = parameter.detach().to("cpu", copy=True).contiguous()
        hasher.update(ctypes.string_at(raw.data_ptr(), raw.nbytes))
    return hasher.hexdigest()


def parse_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--context", type=int, default=128, help="bytes a sequence")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; they decide the bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", type=pathlib.Path, metavar="FILE", help="write the result here")
    return parser.parse_args()


def main() -> None:
    options = parse_command_line()
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(options.seed)
    corpus = read_corpus()
    model = GPT(options.layers, options.width, options.heads, options.context).to(options.device)

    start = time.perf_counter()
    losses = train(model, corpus, options)
    seconds = time.perf_counter() - start  # loss.item() has waited for the device.

    on_cuda = torch.device(options.device).type == "cuda"
    result = {
        "losses": [loss.hex() for loss in losses],
        "weights_sha256": hash_of_weights(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
        "seconds": seconds,
    }
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, {seconds:.1f} s")
    if options.losses is not None:
        options.losses.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
