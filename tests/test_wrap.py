"""trainstream.wrap(): what is paged is said by the caller or by measured peaks; the bits stay.

Every script runs in a process of its own, which wrap() itself switches on where `conf` is None.
"""

import pytest
from real_runner import needs_extension, run_real

pytestmark = needs_extension

# Six blocks of 4.1 MB each, and a head; targets and batches from a seed.
STACK = """
from torch import nn

class Block(nn.Module):
    def __init__(self, n=512):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 1024), nn.Linear(1024, n)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Stack(nn.Module):
    def __init__(self, blocks=6, n=512):
        super().__init__()
        self.layers = nn.ModuleList(Block(n) for _ in range(blocks))
        self.head = nn.Linear(n, n)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make(blocks=6, lr=1e-3):
    torch.manual_seed(7)
    model = Stack(blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)

def batch(step, rows=32, n=512):
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, n, generator=g), torch.randn(rows, n, generator=g)

def train_step(model, optimizer, step, rows=32):
    x, y = batch(step, rows)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def weights(model):
    return [p.detach().clone() for p in model.parameters()]
"""


def test_blocks_paged_and_unpaged_between_steps_change_no_bit(tmp_path):
    """Against torch's AdamW, the unpaged run, and several patterns of moving blocks."""
    script = (
        STACK
        + """
from torch import nn
patterns = {
    "none": lambda pager, step: None,
    "all": lambda pager, step: [pager.page(i) for i in range(6)],
    "turns": lambda pager, step: (pager.page(step % 6), pager.unpage((step + 3) % 6)),
    "flip": lambda pager, step: [
        (pager.page if (step + i) % 2 else pager.unpage)(i) for i in range(6)],
}
model, optimizer = make()
stock = [train_step(model, optimizer, step) for step in range(10)]
stock_weights = weights(model)
results = {}
trainstream.enable(device="sim", vram="160MiB")
from trainstream import _C
for name, move in patterns.items():
    model, optimizer = make()
    same = trainstream.wrap(model, optimizer, "sim", vram="160MiB", offload=True, param_offload=False)
    assert same[0] is model and same[1] is optimizer
    assert isinstance(optimizer, trainstream.optim.AdamW)
    session = trainstream.session(model)
    losses, seen = [], set()
    for step in range(10):
        move(session.pager, step)
        seen.add(tuple(session.pager.paged))
        losses.append(train_step(model, optimizer, step))
        for i, layer in enumerate(model.layers):
            assert i in session.pager.paged or not is_cold(layer.up.weight)
        paged = [p for i in session.pager.paged for p in model.layers[i].parameters()]
        left = sum(4 * p.numel() for p in paged if _C.is_managed(p) and not is_cold(p))
        assert left <= 2 * max(session.pager.block_bytes), (name, step, left)
    assert (len(seen) > 1) == (name in ("turns", "flip"))
    results[name] = losses, weights(model)
    assert max(abs(a - b) for a, b in zip(losses, stock)) < 1e-4
    assert max((a - b).abs().max() for a, b in zip(weights(model), stock_weights)) < 2e-4
    sizes = session.pager.block_bytes
    assert session.pager.bytes_paged == sum(sizes[i] for i in session.pager.paged)
    trainstream.unwrap(model)
losses, end = results.pop("none")
for name, (other_losses, other_end) in results.items():
    assert other_losses == losses, name
    assert all(a.equal(b) for a, b in zip(end, other_end)), name
print(len(results), stats()["evicted_bytes"] > 0, stats()["restored_bytes"] > 0)
"""
    )
    assert run_real(tmp_path, script, None).stdout == "3 True True\n"
