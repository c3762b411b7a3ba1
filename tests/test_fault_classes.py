"""Kinds of faults that systems like this one have had, each provoked on purpose.

Those that another test shows already are not here; docs/compatibility.md has the whole list.
"""

import pytest
from real_runner import DEVICES, exit_numbers, needs_extension, run_both

pytestmark = needs_extension

UNDER = {"sim": "vram:8MiB,min_storage:64KiB,verify:1", "cuda": "vram:48MiB,verify:1"}

MODEL = """
from torch import nn
N = 256 if DEVICE == "cpu" else 1024

def rows(step, micro=0):
    g = torch.Generator().manual_seed(100 * step + micro)
    return torch.randn(16, N, generator=g).to(DEVICE)

def make_model(dropout=0.0):
    torch.manual_seed(7)
    layers = [m for _ in range(6) for m in (nn.Linear(N, N), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers).to(DEVICE)
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("to_none", [True, False])
def test_no_gradient_is_lost_between_micro_steps(tmp_path, device, to_none):
    """Gradients leave between backward passes, and some parameters have none in some of them."""
    script = f"""
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    for micro in range(4):
        part = model if micro % 2 == 0 else model[6:]
        (part(rows(step, micro)).square().mean() / 4).backward()
        evict_all()
    print([digest(p.grad) for p in model.parameters()])
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    evict_all()
    optimizer.step()
    optimizer.zero_grad(set_to_none={to_none})
    evict_all()
    print(norm.item().hex())
print([digest(p) for p in model.parameters()])
"""
    result = run_both(tmp_path, MODEL + script, UNDER[device], device=device)
    assert exit_numbers(result)["evicted"] > 0 and "verify" not in result.stderr


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masters_follow_writes_from_outside_wherever_the_weight_is(tmp_path, device, dtype):
    """A weight that is cold, clean on both sides or in a frame when others write to it."""
    script = f"""
from trainstream.optim import AdamW
model = make_model().to(torch.{dtype})
optimizer = AdamW(model.parameters(), lr=1e-2)
kept = {{k: v.clone() for k, v in model.state_dict().items()}}
for step in range(9):
    model(rows(step).to(torch.{dtype})).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    evict_all()
    if step == 2:
        optimizer.synchronize()  # What is being updated stays where it is.
        evict_all()
        assert _C is None or is_cold(model[0].weight)
        with torch.no_grad():
            model[0].weight.mul_(0.5)
            model[3].weight[3:9] = 0.25
            model[6].weight.data.copy_(model[9].weight)
    if step == 4:
        model[9].weight.data = model[9].weight.data * 2
    if step == 5:
        optimizer.synchronize()  # What is being updated stays where it is.
        evict_all()
        assert _C is None or is_cold(model[3].weight)
        model.load_state_dict(kept)
    print([digest(p) for p in model.parameters()])
"""
    result = run_both(tmp_path, MODEL + script, UNDER[device], device=device)
    assert exit_numbers(result)["evicted"] > 0 and "verify" not in result.stderr


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_are_those_of_the_plain_run(tmp_path, device):
    """Dropout after every call of ours that might have drawn a number or moved a generator."""
    script = """
from trainstream import spill_activations
model = make_model(dropout=0.3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def state():
    return digest(torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state())

for step in range(5):
    with spill_activations(share=0.5):
        loss = model(rows(step)).square().mean()
    loss.backward()
    before = state()
    evict_all()
    if step == 1:
        trainstream.memory_report(model), trainstream.report()
    trainstream.mark_step()
    assert state() == before
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), state())
model, optimizer = trainstream.wrap(model, optimizer, offload=False) if _C else (model, optimizer)
print(state())
for step in range(3):
    loss = model(rows(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), state())
print([digest(p) for p in model.parameters()])
"""
    assert exit_numbers(run_both(tmp_path, MODEL + script, UNDER[device], device=device))["evicted"]


@pytest.mark.parametrize("device", DEVICES)
def test_forward_passes_without_gradients_save_and_mark_nothing(tmp_path, device):
    """Hooks of ours are there (spilling, wrap's) and the script's own run as often as without."""
    script = """
calls = []
model = make_model()
for layer in model:
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if _C:
    trainstream.wrap(model, optimizer, offload=False, activation_offload=True, param_offload=True)
frozen = make_model().requires_grad_(False)

def reference(x):
    for _ in range(3):
        with torch.no_grad(), trainstream.spill_activations(share=1.0):
            x = frozen(x)
        with torch.inference_mode():
            y = model(x)
    return x, y.clone()

for step in range(5):
    saved = stats().get("saved_bytes", 0)
    target, other = reference(rows(step))
    assert stats().get("saved_bytes", 0) == saved
    loss = (model(rows(step)) - target).square().mean()
    with torch.no_grad():
        model(rows(step, 1))  # Between a forward pass and its backward pass.
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex(), digest(other), len(calls), target.requires_grad)
print([digest(p) for p in model.parameters()])
"""
    assert exit_numbers(run_both(tmp_path, MODEL + script, UNDER[device], device=device))["evicted"]


@pytest.mark.parametrize("device", DEVICES)
def test_files_of_cold_and_tied_weights_have_every_byte_and_resume_exactly(tmp_path, device):
    """torch.save of what is cold, half cold or paged; counters of steps come from the file."""
    script = """
import io

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.into, self.out = nn.Embedding(N, N), nn.Linear(N, N, bias=False)
        self.out.weight = self.into.weight

    def forward(self, ids):
        return self.out(self.body(self.into(ids)))

def run(model, optimizer, scheduler, steps):
    for step in steps:
        ids = rows(step).argsort(-1)[:, 0]
        loss = nn.functional.cross_entropy(model(ids), ids.roll(1))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

def make():
    model = Tied().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

def show(model, optimizer, scheduler):
    print([digest(p) for p in model.parameters()], scheduler.get_last_lr(), [
        [digest(v) for v in state.values()] for state in optimizer.state.values()])

first = make()
run(*first, range(4))
evict_all()
first[0].body[0](rows(1))
file = io.BytesIO()
torch.save([part.state_dict() for part in first], file)
print(hashlib.sha256(file.getvalue()).hexdigest())
run(*first, range(4, 7))
show(*first)
second = make()
run(*second, range(2))  # A run that got elsewhere takes over all that is in the file.
evict_all()
file.seek(0)
for part, state in zip(second, torch.load(file)):
    part.load_state_dict(state)
assert second[0].out.weight is second[0].into.weight
run(*second, range(4, 7))
show(*second)
x, y = (second[0].get_parameter(name) for name in ("out.weight", "into.weight"))
evict_all()
with torch.no_grad():
    x[0].fill_(5)
    evict_all()
    print(y[0].unique().tolist(), x.untyped_storage()._cdata == y.untyped_storage()._cdata)
"""
    result = run_both(tmp_path, MODEL + script, UNDER[device], device=device)
    _, unbroken, resumed, tied = result.stdout.splitlines()
    assert unbroken == resumed and tied == "[5.0] True"
    assert exit_numbers(result)["evicted"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_saved_tensors_unpacked_twice_are_the_same(tmp_path, device):
    """By two backward passes over one graph, and by gradients of gradients, with spilling."""
    script = """
model = make_model()
for step in range(4):
    x = rows(step).requires_grad_()
    with trainstream.spill_activations(share=1.0):
        loss = model(x).square().mean()
    evict_all()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    evict_all()
    second = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    evict_all()
    slope.square().sum().backward()
    print(all(a.equal(b) for a, b in zip(first, second)), [digest(a) for a in first],
          [digest(p.grad) for p in model.parameters() if p.grad is not None])
"""
    assert exit_numbers(run_both(tmp_path, MODEL + script, UNDER[device], device=device))["evicted"]
