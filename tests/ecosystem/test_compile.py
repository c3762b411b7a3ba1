"""torch.compile: block by block, the whole model, the optimizer, and graphs where a GPU is."""

import shutil

import pytest
from matrix import LONG, ecosystem, run_cell
from real_runner import DEVICES, on_gpu

pytestmark = ecosystem
has_compiler = shutil.which("g++") is not None

MODEL = """
from torch import nn
import torch.nn.functional as F
torch.manual_seed(3)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.silu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model().to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(step, forward):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (4, 33), generator=g).to(DEVICE)
    loss = F.cross_entropy(forward(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item())

STEPS = 40 if LONG else 6
"""
TRAIN = """
for step in range(STEPS):
    train(step, model)
show(model, optimizer)
"""


def run(tmp_path, script, device, **options):
    """The runs of one cell share what was compiled, so only the first one compiles."""
    compiler = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    compiler["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    # Compiled code keeps what it works on for a whole forward pass: half of the peak.
    options = {"share": 0.5, **options}
    return run_cell(tmp_path, MODEL + script, device=device, **options, **compiler)


def backends():
    marks = [
        pytest.mark.skipif(not has_compiler, reason="Inductor needs g++ here"),
        pytest.mark.skipif(not LONG, reason="Inductor compiles for a minute: of the long form"),
    ]
    return ["aot_eager", pytest.param("inductor", marks=marks)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", backends())
def test_blocks_compiled_one_by_one(tmp_path, device, backend):
    script = f"""
for block in model.blocks:
    block.compile(backend={backend!r})
"""
    run(tmp_path, script + TRAIN, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", backends())
def test_whole_model_compiled(tmp_path, device, backend):
    """In the long form evaluated under no_grad in between, too, with a shape of its own."""
    script = f"""
compiled = torch.compile(model, backend={backend!r})
for step in range(STEPS):
    train(step, compiled)
    if LONG and step == STEPS // 2:
        with torch.no_grad():
            show(compiled(torch.arange(24, device=DEVICE).view(2, 12)))
show(model, optimizer)
"""
    run(tmp_path, script, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", backends())
@pytest.mark.skipif(not LONG, reason="traces for a minute: of the long form")
def test_optimizer_step_compiled(tmp_path, device, backend):
    script = f"optimizer.step = torch.compile(optimizer.step, backend={backend!r})\n"
    run(tmp_path, script + TRAIN, device)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_compiled_with_graphs(tmp_path, device):
    """mode="reduce-overhead": graphs keep addresses, so what they touch stays; the rest moves."""
    script = """
for block in model.blocks[:2]:
    block.compile(mode="reduce-overhead")
for step in range(STEPS):
    torch.compiler.cudagraph_mark_step_begin()
    train(step, model)
show(model, optimizer)
"""
    run(tmp_path, script, device, share=0.6, moves=False)
