"""Kernels that torch does not dispatch, graphs, and libraries that bring kernels of their own."""

import os
import shutil

import pytest
import torch
from matrix import ecosystem, run_cell
from real_runner import DEVICES, on_gpu, run_real
from script_runner import ROOT

pytestmark = ecosystem

CCACHE_COMPILER = "/usr/lib/ccache/g++"

LAYERS = """
from torch import nn
torch.manual_seed(3)
model = nn.Sequential(
    *[m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]).to(DEVICE)

def rows(step):
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)

STEPS = 40 if LONG else 8

def take_steps(optimizer, loss_of):
    for step in range(STEPS):
        loss = loss_of(rows(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss.item())

def train(optimizer, loss_of):
    take_steps(optimizer, loss_of)
    show(model, optimizer)
"""

EXTENSION = """
import tempfile
from torch.utils.cpp_extension import load_inline

SOURCE = '''
#include <torch/extension.h>
// As many an extension does: takes tensors, works on bare pointers, and tells no dispatcher.
torch::Tensor scaled(torch::Tensor x, torch::Tensor scale) {
    auto out = torch::empty_like(x);
    const float* from = x.data_ptr<float>();
    const float* by = scale.data_ptr<float>();
    float* to = out.data_ptr<float>();
    const int64_t n = scale.numel();
    for (int64_t i = 0; i < x.numel(); i++) to[i] = from[i] * by[i % n];
    return out;
}
void descend(torch::Tensor weight, torch::Tensor gradient, double rate) {
    float* to = weight.data_ptr<float>();
    const float* from = gradient.data_ptr<float>();
    for (int64_t i = 0; i < weight.numel(); i++) to[i] -= static_cast<float>(rate) * from[i];
}
'''
kernels = load_inline(
    "kernels", SOURCE, functions=["scaled", "descend"], build_directory=os.environ["BUILT"])

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return kernels.scaled(x.contiguous(), scale)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return kernels.scaled(gradient.contiguous(), scale), (gradient * x).sum(0)

class Descent(torch.optim.Optimizer):
    def __init__(self, params, rate):
        super().__init__(params, {"rate": rate})

    def step(self):
        for p in self.param_groups[0]["params"]:
            kernels.descend(p.data, p.grad, self.param_groups[0]["rate"])

scales = nn.ParameterList(torch.ones(WIDTH) + i for i in range(6))
table = nn.Parameter(torch.randn(32, WIDTH))

def loss_of(x):
    for layer, scale in zip(model[::2], scales):
        x = Scaled.apply(layer(x).tanh(), scale) + Scaled.apply(table, scale)
    return x.square().mean()

train(Descent([*model.parameters(), *scales, table], 1e-3), loss_of)
show(scales, table)
"""


@pytest.mark.parametrize("device", [pytest.param("sim", id="sim")])
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_cpp_extension_that_works_on_bare_pointers(tmp_path, device):
    """In an autograd function and in an optimizer, which writes what no operator announces."""
    # Where later runs find it: compiling takes longer than all of the rest.
    built = ROOT / "build" / f"kernels-{torch.__version__}"
    built.mkdir(parents=True, exist_ok=True)
    # As setup.py does it, so that it is compiled once for all clones.
    cached = {
        "CCACHE_BASEDIR": str(ROOT),
        "CCACHE_NOHASHDIR": "1",
        "TORCH_NO_COMPILER_WRAPPER": "1",
    }
    if os.access(CCACHE_COMPILER, os.X_OK):
        cached["CXX"] = CCACHE_COMPILER
    run_cell(tmp_path, LAYERS + EXTENSION, device=device, BUILT=str(built), **cached)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_triton_kernel_in_an_autograd_function(tmp_path, device):
    script = """
import triton
import triton.language as tl

@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

def doubled(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    double[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x)

    @staticmethod
    def backward(ctx, gradient):
        return doubled(gradient)

def loss_of(x):
    for layer in model[::2]:
        x = nn.functional.linear(x, Double.apply(layer.weight), layer.bias).tanh()
    return x.square().mean()

train(torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.5)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_graphed_callables(tmp_path, device):
    """What a graph touches keeps its address; layers outside of it move."""
    script = """
graphed = torch.cuda.make_graphed_callables(nn.Sequential(*model[:2]), (rows(0),))

def loss_of(x):
    return model[2:](graphed(x)).square().mean()

train(torch.optim.AdamW(model.parameters(), lr=1e-3), loss_of)
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.7)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_whole_step_in_a_graph(tmp_path, device):
    """All of it is the graph's, so nothing of it may move: beside it, other tensors do."""
    script = """
others = [torch.full((WIDTH, WIDTH), float(i), device=DEVICE) for i in range(48)]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
x = rows(0)
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
for step in range(STEPS):
    x.copy_(rows(step))
    graph.replay()
    others = [w @ w.t() for w in others[1:]] + others[:1]
    others = [w / w.norm() for w in others]
    show(loss.item())
show(model, others)
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.7)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
@pytest.mark.parametrize("conf", ["expandable_segments:True", "max_split_size_mb:64"])
def test_settings_of_torchs_allocator(tmp_path, device, conf):
    script = """
torch.cuda.memory._record_memory_history(max_entries=10000)
train(torch.optim.AdamW(model.parameters(), lr=1e-3), lambda x: model(x).square().mean())
assert torch.cuda.memory._snapshot()["segments"]
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.5, PYTORCH_ALLOC_CONF=conf)


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_cuda_malloc_async_is_refused_in_one_line_and_the_script_runs(tmp_path, device):
    script = LAYERS.replace("WIDTH", "256").replace("LONG", "False").replace("show", "print")
    script += "train(torch.optim.SGD(model.parameters(), lr=0.1), lambda x: model(x).mean())\n"
    result = run_real(
        tmp_path,
        script,
        "vram:64MiB",
        device=device,
        fresh=True,
        PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
    )
    (line,) = result.lines()
    assert line.startswith("trainstream: off: torch's CUDA allocator is 'cudaMallocAsync'"), line


@pytest.mark.parametrize("device", DEVICES)
def test_eight_bit_optimizer_of_bitsandbytes(tmp_path, device):
    pytest.importorskip("bitsandbytes")
    script = """
import bitsandbytes
optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)
train(optimizer, lambda x: model(x).square().mean())
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.5)


@pytest.mark.parametrize("device", DEVICES)
def test_quantized_weights_of_torchao(tmp_path, device):
    """Frozen subclasses of int8 weights under adapters, and an optimizer with 8-bit states."""
    pytest.importorskip("torchao")
    script = """
from torchao.optim import AdamW8bit
from torchao.quantization import Int8WeightOnlyConfig, quantize_
frozen = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]).to(DEVICE)
quantize_(frozen.requires_grad_(False), Int8WeightOnlyConfig())

def loss_of(x):
    for layer, base in zip(model[::2], frozen):
        x = (layer(x) + base(x)).tanh()
    return x.square().mean()

STEPS = 4
take_steps(AdamW8bit(model.parameters(), lr=1e-3), loss_of)
show(model)
show([layer.weight.dequantize() for layer in frozen])
"""
    run_cell(tmp_path, LAYERS + script, device=device, share=0.5)
