"""Scripts for torchrun: DistributedDataParallel and FSDP2 over gloo, each rank at half its peak."""

import socket

import pytest
from matrix import (
    EPILOGUE,
    LONG,
    PRELUDE,
    Shown,
    check_host_memory,
    ecosystem,
    last_numbers,
    long_form,
    note,
    shown_lines,
    stock_peak,
)
from real_runner import DEVICES, check_status, switch, with_prelude
from script_runner import Result, run_scripts

pytestmark = [
    *ecosystem,
    pytest.mark.parametrize("device", DEVICES),
    pytest.mark.parametrize("world", [2, 4]),
]
SHARE = 0.5

# NCCL refuses two ranks on one GPU; gloo takes a GPU's tensors, too.
MODEL = """
import torch.distributed as dist
from torch import nn

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if DEVICE == "cuda":
    torch.cuda.set_device(RANK % torch.cuda.device_count())
several = DEVICE == "cuda" and torch.cuda.device_count() >= WORLD
dist.init_process_group("nccl" if several else "gloo")
torch.manual_seed(3)
block = lambda: nn.TransformerEncoderLayer(
    WIDTH, 4, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def loss_of(model, step):
    g = torch.Generator().manual_seed(100 * step + RANK)
    ids = torch.randint(0, 512, (4, 17), generator=g).to(DEVICE)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

STEPS = 40 if LONG else 6
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(folder, script, confs, device) -> list[Result]:
    """Runs a script as torchrun would: one process for each of `confs`."""
    common = {"WORLD_SIZE": str(len(confs)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **switch(conf, device)}
        for rank, conf in enumerate(confs)
    ]
    text = with_prelude(PRELUDE.format(long=LONG) + script + EPILOGUE, device, seconds=200)
    fresh = LONG or device == "cuda"
    preload = ("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel")
    results = run_scripts(folder, text, ranks, fresh=fresh, preload=preload)
    for result in results:
        check_status(result)
    return results


def run_cell_of_ranks(folder, script, device, world) -> None:
    small = ",min_storage:4KiB" if device == "sim" else ""
    stock = run_ranks(folder, script, [None] * world, device)
    expected = [shown_lines(result) for result in stock]
    assert all(expected)
    if device == "sim":
        roomy = run_ranks(folder, script, ["vram:64GiB" + small] * world, device)
        assert [shown_lines(result) for result in roomy] == expected
        peaks = [last_numbers(result, 1)["peak"] for result in roomy]
    else:
        peaks = [stock_peak(result) for result in stock]
    budgets = [int(peak * SHARE) for peak in peaks]
    confs = [f"vram:{budget},verify:1{small}" for budget in budgets]
    tight = run_ranks(folder, script, confs, device)
    assert [shown_lines(result) for result in tight] == expected
    numbers = [last_numbers(result, 1) for result in tight]
    assert all(each["evicted"] > 0 for each in numbers)
    assert not any("written without being" in result.stderr for result in tight)
    for each, peak in zip(numbers, peaks, strict=True):
        check_host_memory(each, peak)
    note(device, SHARE, Shown(expected[0], peaks[0], budgets[0], numbers[0]))


def test_distributed_data_parallel(tmp_path, device, world):
    script = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(Model().to(DEVICE), bucket_cap_mb=0.25 if DEVICE == "cpu" else 25)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    with model.no_sync():
        loss_of(model, 2 * step).backward()
    loss = loss_of(model, 2 * step + 1)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item(), norm.item())
show(model, optimizer)
"""
    run_cell_of_ranks(tmp_path, MODEL + script + END, device, world)


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=long_form)])
def test_fully_shard(tmp_path, device, world, reshard):
    script = f"""
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh(DEVICE, (WORLD,))
model = Model().to(DEVICE)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, reshard_after_forward={reshard})
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    loss = loss_of(model, step)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item(), norm.item())
show([p.to_local() for p in model.parameters()])
if DEVICE == "cpu":  # Where gloo gathers a GPU's shards like this, stock torch 2.11 crashes.
    show([p.full_tensor() for p in model.parameters()])
"""
    run_cell_of_ranks(tmp_path, MODEL + script + END, device, world)


@long_form
def test_data_parallel_with_its_options_and_sharded_states(tmp_path, device, world):
    """Gradients as views of buckets, unused parameters, ZeroRedundancyOptimizer."""
    script = """
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
model = Model().to(DEVICE)
model.unused = nn.Linear(WIDTH, WIDTH).to(DEVICE)
model = DistributedDataParallel(
    model, gradient_as_bucket_view=True, find_unused_parameters=True,
    bucket_cap_mb=0.25 if DEVICE == "cpu" else 25)
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
for step in range(STEPS):
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item())
show(model, optimizer.optim)
"""
    run_cell_of_ranks(tmp_path, MODEL + script + END, device, world)


@long_form
def test_fully_shard_in_bfloat16_with_checkpoints_of_its_own(tmp_path, device, world):
    """Mixed precision, its own offload to the CPU, and torch.distributed.checkpoint."""
    script = """
import tempfile
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
mesh = init_device_mesh(DEVICE, (WORLD,))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

def make():
    model = Model().to(DEVICE)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def train(model, optimizer, steps):
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss.item())

model, optimizer = make()
train(model, optimizer, range(STEPS))
path = [tempfile.mkdtemp()]
dist.broadcast_object_list(path)
state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(state, checkpoint_id=path[0])
train(model, optimizer, range(STEPS, STEPS + 2))
again, other = make()
state = dict(zip(("model", "optimizer"), get_state_dict(again, other)))
dcp.load(state, checkpoint_id=path[0])
set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
train(again, other, range(STEPS, STEPS + 2))
show([p.to_local() for p in model.parameters()])
show(all(p.to_local().equal(q.to_local()) for p, q in zip(model.parameters(), again.parameters())))
"""
    run_cell_of_ranks(tmp_path, MODEL + script + END, device, world)


@long_form
def test_tensor_parallel(tmp_path, device, world):
    script = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
mesh = init_device_mesh(DEVICE, (WORLD,))
model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                                      nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]).to(DEVICE)
for block in model:
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for step in range(STEPS):
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(DEVICE)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item())
show([p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()])
"""
    run_cell_of_ranks(tmp_path, MODEL + script + END, device, world)
