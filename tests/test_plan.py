"""The plan over real training: loads ahead of need change no bit, and do come ahead."""

import json

import pytest
from real_runner import DEVICES, needs_extension, run_both, run_real

pytestmark = needs_extension

# 12 layers of 1 MiB; with gradients and two states a step has 48 MiB. On a GPU 16 times that:
# torch's allocator takes 20 MiB at a time for less than 10.
MODEL = """
from torch import nn
width = 512 if DEVICE == "cpu" else 2048
layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)]).to(DEVICE)
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
batch = torch.randn(64, width, device=DEVICE)

def step(rows=64):
    loss = layers(batch[:rows]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()
"""
UNDER = "vram:25MiB,min_storage:256KiB"
UNDER_ON_GPU = "vram:400MiB,min_storage:256KiB"


@pytest.mark.parametrize("device", DEVICES)
def test_planned_steps_have_the_same_bits_and_wait_for_little(tmp_path, device):
    run_both(
        tmp_path,
        MODEL
        + """
print([step() for _ in range(6)])
print([digest(p) for p in layers.parameters()])
if _C is not None:
    found = stats()
    assert found["plans"] == 1, found
    assert found["loaded_ahead_bytes"] > 25 << 20, found
    assert found["demanded_bytes"] < found["loaded_ahead_bytes"] // 8, found
    assert found["failures"] == 0, found
""",
        UNDER if device == "sim" else UNDER_ON_GPU,
        device=device,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_weights_of_data_parallel_and_checkpoints_are_planned(tmp_path, device):
    run_both(
        tmp_path,
        MODEL
        + """
from torch.utils.checkpoint import checkpoint
backend = "gloo" if DEVICE == "cpu" else "nccl"
torch.distributed.init_process_group(
    backend, store=torch.distributed.HashStore(), rank=0, world_size=1)

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = layers
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=i % 2 == 1)
        return x

parallel = nn.parallel.DistributedDataParallel(Whole())
def step():
    loss = parallel(batch.clone().requires_grad_()).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item().hex()

print([step() for _ in range(6)])
print([digest(p) for p in layers.parameters()])
if _C is not None:
    (planned,) = _C.recorded_steps()
    large = [size for size in planned["item_bytes"] if size >= 1 << 20]
    assert len(large) == 12 + 24, planned["item_bytes"]  # Weights and states.
    assert stats()["loaded_ahead_bytes"] > 25 << 20, stats()
torch.distributed.destroy_process_group()
""",
        "vram:40MiB,min_storage:256KiB" if device == "sim" else "vram:640MiB,min_storage:256KiB",
        device=device,
    )


def test_steps_that_stray_have_the_same_bits(tmp_path):
    run_both(
        tmp_path,
        MODEL
        + """
losses = [step() for _ in range(3)]
with torch.no_grad():
    losses.append(layers(batch).sum().item().hex())      # An evaluation in between,
losses.append(step(rows=16))                             # a shorter batch,
loss = layers[:6](batch).pow(2).mean()                   # a step over half of the layers,
loss.backward()
optimizer.step()
losses.append(loss.item().hex())                         # gradients that stay for the next one,
losses += [step() for _ in range(2)]
layers[3] = nn.Linear(512, 512).to(DEVICE)             # and another layer.
optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3)
losses += [step() for _ in range(4)]
print(losses, [digest(p) for p in layers.parameters()])
""",
        UNDER,
    )


def test_without_a_plan_nothing_is_loaded_ahead(tmp_path):
    result = run_real(
        tmp_path,
        MODEL
        + "\n[step() for _ in range(4)]\nprint(stats()['plans'], stats()['loaded_ahead_bytes'])",
        UNDER + ",plan:0",
    )
    assert result.stdout.split() == ["0", "0"]


def test_loops_without_an_optimizer_say_where_a_step_ends(tmp_path):
    run_both(
        tmp_path,
        """
from torch import nn
layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)]).to(DEVICE)
batch = torch.randn(64, 512, device=DEVICE)
sums = []
for _ in range(6):
    with torch.no_grad():
        sums.append(layers(batch).sum().item().hex())
    trainstream.mark_step()
print(sums)
if _C is not None:
    found = stats()
    assert found["plans"] == 1 and found["loaded_ahead_bytes"] > 0, found
""",
        "vram:6MiB,min_storage:256KiB",
    )


def test_detach_is_no_write(tmp_path):
    result = run_real(
        tmp_path,
        """
import json
from torch import nn
layer = nn.Linear(1024, 1024, bias=False).to(DEVICE)
x = torch.randn(8, 1024, device=DEVICE)
evict_all()
layer(x).sum()                 # It comes in.
layer.weight.detach()          # As autograd does with weights that it saves.
before = stats()
evict_all()
after = stats()
print(json.dumps([after[k] - before[k] for k in ("evicted_bytes", "dropped_bytes")]))
""",
        "vram:100MiB,min_storage:1MiB",
    )
    evicted, dropped = json.loads(result.stdout)
    assert (evicted, dropped) == (0, 4 << 20)


def test_updates_during_backward_end_before_the_interpreter_does(tmp_path):
    result = run_real(
        tmp_path,
        """
import trainstream.optim
from torch import nn
layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(DEVICE)
optimizer = trainstream.optim.AdamW(layers.parameters(), lr=1e-3, accumulation_steps=1)
for _ in range(3):
    layers(torch.randn(8, 512, device=DEVICE)).sum().backward()
    optimizer.step()
layers(torch.randn(8, 512, device=DEVICE)).sum().backward()  # Left running.
print("done")
""",
        "vram:10MiB,min_storage:256KiB",
        fresh=True,
    )
    assert result.stdout.strip() == "done"
    assert "terminate" not in result.stderr
