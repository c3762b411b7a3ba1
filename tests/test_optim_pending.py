"""Updates that go on while the next step begins: whoever uses a weight waits for its own only."""

import pytest
from real_runner import needs_extension, on_gpu, run_both, run_real

pytestmark = needs_extension

# Weights and gradients of 1 MiB each, more than the budget holds; biases that nobody manages. No
# update begins before backward has ended, so that all gradients are there at once, whatever the
# threads' turns; once updates may be left pending none begins before step() has returned. Each is
# slow.
MODEL = """
import threading, time
from torch import nn
from trainstream.optim import AdamW

# A GPU's libraries have 33 MiB of their own.
WIDTH = 512 if DEVICE == "cpu" else 1536
layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(10)]).to(DEVICE)
batch = torch.randn(64, WIDTH, device=DEVICE)
left_pending = 0
gate = threading.Event()
gate.set()

def slow(optimizer, seconds=0.001):
    update = optimizer._update
    def slowly(*args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            gate.wait(timeout=1)
            time.sleep(seconds * len(args[0]))
        update(*args, **kwargs)
    optimizer._update = slowly
    return optimizer

def pending(optimizer):
    return sum(update.may_come_later for update in optimizer._early._queue._open())

def step(optimizer, model=layers, to_none=True):
    global left_pending
    loss = model(batch).pow(2).mean()
    if _C is not None:
        gate.clear()
    loss.backward()
    if _C is not None and not _C.may_leave_pending(batch):
        gate.set()
    optimizer.step()
    left_pending += pending(optimizer)
    gate.set()
    optimizer.zero_grad(set_to_none=to_none)
    return loss.item().hex()

def finish(optimizer):
    print([digest(p) for p in layers.parameters()])
    optimizer.synchronize()
    print([digest(optimizer.state[p][name]) for p in layers.parameters()
           for name in ("exp_avg", "exp_avg_sq", "step")])
    if _C is not None:
        assert left_pending > 10, left_pending
        assert stats()["failures"] == 0, stats()
        assert _C.user_threads() <= 1  # The script's: regions are laid anew then.
"""
UNDER = "vram:14MiB,min_storage:256KiB,verify:1"
ON = [pytest.param("sim", UNDER, id="sim"), on_gpu("cuda", "vram:160MiB,verify:1")]
WAYS = {
    "early": "accumulation_steps=1",
    "at the step": "",
    "clipped": "max_grad_norm=0.01",
    "clipped, early steps known": "max_grad_norm=0.01, accumulation_steps=1",
}


@pytest.mark.parametrize(("device", "conf"), ON)
@pytest.mark.parametrize("way", WAYS)
def test_steps_that_overlap_their_updates_have_the_same_bits(tmp_path, way, device, conf):
    script = f"""
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, {WAYS[way]}))
print([step(optimizer, to_none=i % 2 == 0) for i in range(8)])
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, conf, device=device)


# What a script may do right after a step; each prints what it saw.
READS = {
    "operators": "print(layers[4].weight.sum().item().hex())",
    "a view": "print(layers[4].weight.detach()[3:5].t().sum().item().hex())",
    "an operator that writes": "with torch.no_grad(): layers[5].weight.mul_(0.5)",
    "memory": "print(digest(torch.from_dlpack(layers[4].weight.detach())))",
    "other memory": "layers[6].weight.data = layers[6].weight.data.clone()",
    "exchanged memory": "layers[6].weight.data = torch.zeros(WIDTH, WIDTH, device=DEVICE)",
    "a checkpoint": "print([digest(v) for v in layers.state_dict().values()])",
    "a copy": "import copy; print(digest(copy.deepcopy(layers)[3].weight))",
    "a thread": "t = threading.Thread("
    "target=lambda: print(layers[4].weight.sum().item().hex())); t.start(); t.join()",
    "a gradient": "print(None if layers[4].weight.grad is None else digest(layers[4].weight.grad))",
    "an optimizer's state": "print(digest(optimizer.state[layers[4].weight]['step']))",
    "its checkpoint": "print(digest(optimizer.state_dict()['state'][8]['exp_avg']))",
    "a step without gradients": "optimizer.step()",
    "a learning rate": "optimizer.param_groups[0]['lr'] *= 0.5",
    "a part of the model": "print(step(optimizer, layers[4:]))",
    "another group": "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]})",
    "a frozen weight": "layers[7].weight.requires_grad_(False)",
}


@pytest.mark.parametrize("way", ["early", "at the step"])
def test_whatever_follows_a_step_sees_its_updates(tmp_path, way):
    reads = "\n".join(
        f"print({name!r}, step(optimizer), step(optimizer))\n{read}" for name, read in READS.items()
    )
    script = f"""
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, {WAYS[way]}))
print([step(optimizer) for _ in range(4)])
{reads}
print([step(optimizer) for _ in range(2)])
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_optimizer_that_is_gone_has_done_its_updates(tmp_path):
    script = """
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, accumulation_steps=1))
print([step(optimizer) for _ in range(5)])
del optimizer
print([digest(p) for p in layers.parameters()])
assert _C is None or left_pending > 10, left_pending
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_memory_that_is_let_go_in_the_middle_of_an_update_stays_until_its_end(tmp_path):
    script = """
optimizer = slow(AdamW(layers.parameters(), lr=1e-3))
print([step(optimizer) for _ in range(5)])
layers[3].weight.data = torch.ones(WIDTH, WIDTH, device=DEVICE)
layers[8] = nn.Linear(WIDTH, WIDTH).to(DEVICE)
torch.manual_seed(3)
print([digest(torch.randn(WIDTH, WIDTH, device=DEVICE)) for _ in range(8)])
print([step(optimizer) for _ in range(2)])
print([digest(p) for p in layers.parameters()])
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_update_that_fails_later_keeps_nobody_waiting_and_is_said(tmp_path):
    script = """
optimizer = AdamW(layers.parameters(), lr=1e-3)
for _ in range(4):
    step(optimizer)
optimizer.synchronize()
update = optimizer._update
def fails(*args, **kwargs):
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("no room")
optimizer._update = fails
step(optimizer)
layers(batch)   # Waits for nothing that will not come.
optimizer._update = update
for wait in (optimizer.step, optimizer.step, optimizer.synchronize):
    try:
        wait()
        print("went on")
    except ValueError as error:
        print(error)
"""
    result = run_real(tmp_path, MODEL + script, UNDER)
    assert result.stdout.split("\n") == ["no room", "went on", "went on", ""]


def test_process_that_ends_has_done_its_updates(tmp_path):
    script = """
import atexit
weights = [p.detach() for p in layers.parameters()]
# Runs after the optimizer's own: what was registered first is called last.
atexit.register(lambda: print([digest(w) for w in weights], flush=True))
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, accumulation_steps=1))
print([step(optimizer) for _ in range(6)], flush=True)
assert _C is None or left_pending > 10, left_pending
"""
    run_both(tmp_path, MODEL + script, UNDER, fresh=True)


@pytest.mark.parametrize("way", ["early", "clipped"])
def test_gradients_are_freed_with_their_updates(tmp_path, way):
    script = f"""
import weakref
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, {WAYS[way]}))
gradients = []
for p in layers.parameters():
    p.register_hook(lambda grad: gradients.append(weakref.ref(grad.untyped_storage())))
for _ in range(4):
    step(optimizer)
    optimizer.synchronize()
    held = sum(grad() is not None for grad in gradients)
    print(len(gradients), held)
    assert held == 0
    gradients.clear()
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_gradients_that_wait_for_their_updates_leave_the_device(tmp_path):
    script = """
from trainstream.optim import _queue
_queue._BATCH_ELEMENTS = 1 << 18
optimizer = slow(AdamW(layers.parameters(), lr=1e-3, accumulation_steps=1), 0.01)
print([step(optimizer) for i in range(8)])
finish(optimizer)
if _C is not None:
    assert stats()["spilled_bytes"] > 4 << 20, stats()
"""
    run_both(tmp_path, MODEL + script, UNDER)
