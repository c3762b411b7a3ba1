"""Fused steps of torch's optimizers that are made when their weights are next used.

Each script is run plain and under a budget, and must print the same; under it updates must really
have waited. What tells an update that waits is an operator, an address given out, a fork, a module
that is loaded, a capture; each has a test that fails without it.
"""

import pathlib
import subprocess
import sysconfig

import pytest
import torch
from real_runner import needs_extension, on_gpu, run_both, run_real

pytestmark = needs_extension

# Weights and gradients of 256 KiB each, more than the budget holds; biases that nobody manages. The
# updates of the last 14 layers may be late: their gradients are a quarter of the budget.
MODEL = """
import copy, gc, io
from torch import nn

# A GPU's libraries have 33 MiB of their own.
WIDTH = 256 if DEVICE == "cpu" else 768
layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(40)]).to(DEVICE)
batch = torch.randn(64, WIDTH, device=DEVICE)

def adamw(**options):
    return torch.optim.AdamW(layers.parameters(), lr=1e-3, fused=True, **options)

def backward(model=layers):
    loss = model(batch).pow(2).mean()
    loss.backward()
    return loss.item().hex()

def step(optimizer, model=layers, to_none=True):
    loss = backward(model)
    optimizer.step()
    optimizer.zero_grad(set_to_none=to_none)
    return loss

def copied(value):
    # A deep copy's memory is not managed on the simulation.
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value

def deferred():
    return 0 if _C is None else stats()["deferred_updates"]

def finish(optimizer, least=24):
    print([digest(p) for p in layers.parameters()])
    print([digest(value) for p in layers.parameters() if p in optimizer.state
           for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)])
    if _C is not None:
        assert deferred() >= least, stats()
        assert stats()["failures"] == 0, stats()
"""
UNDER = "vram:14MiB,min_storage:128KiB,verify:1"
ON = [pytest.param("sim", UNDER, id="sim"), on_gpu("cuda", "vram:160MiB,verify:1")]

OPTIMIZERS = {
    "adamw": "adamw()",
    "amsgrad, maximized": "adamw(amsgrad=True, maximize=True)",
    "adam": "torch.optim.Adam(layers.parameters(), lr=1e-3, weight_decay=0.1, fused=True)",
    "sgd": "torch.optim.SGD(layers.parameters(), lr=1e-3, momentum=0.9, nesterov=True, fused=True)",
    "two groups": "torch.optim.AdamW([dict(params=list(layers[:20].parameters()), lr=1e-2), "
    "dict(params=list(layers[20:].parameters()), weight_decay=0)], fused=True)",
    "a rate in a tensor": "torch.optim.AdamW(layers.parameters(), fused=True, "
    "lr=torch.tensor(1e-3, device=DEVICE))",
}


@pytest.mark.parametrize(("device", "conf"), ON)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_late_steps_have_the_same_bits(tmp_path, optimizer, device, conf):
    script = f"""
optimizer = {OPTIMIZERS[optimizer]}
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
for i in range(8):
    print(step(optimizer, to_none=i % 3 != 2))
    schedule.step()
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, conf, device=device)


# What may come between a step and the next one. `p` is a weight, `state` its states.
BETWEEN = {
    "nothing": "",
    "a weight is read": "print(digest(p))",
    "a bias that nobody manages is read": "print(digest(layers[39].bias))",
    "a state is read": "print(digest(state['exp_avg']), state['step'].item())",
    "a gradient is read": "print(digest(p.grad))",
    "a gradient is changed": "p.grad.mul_(3); [q.grad.zero_() for q in layers.parameters()]",
    "gradients are clipped": "print(nn.utils.clip_grad_norm_(layers.parameters(), 1e-3).item())",
    "a weight is written": "with torch.no_grad(): p.mul_(0.5)",
    "a weight's view is written": "p.detach()[3:7].fill_(0.25)",
    "a state is written": "state['exp_avg'].zero_(); state['step'].fill_(3)",
    "the rate is written": "optimizer.param_groups[0]['lr'] = 0.5",
    "the weight gets other memory": "p.data = torch.ones_like(p)",
    "the gradient gets other memory": "p.grad = torch.ones_like(p)",
    "all are averaged": "torch._foreach_lerp_(average, list(layers.parameters()), 0.25); "
    "print([digest(a) for a in average])",
    "the model is copied": "print([digest(q) for q in copy.deepcopy(layers).parameters()])",
    "the optimizer is copied": "print([digest(v) for s in copy.deepcopy(optimizer)"
    ".state.values() for v in s.values()])",
    "all is saved": "file = io.BytesIO(); torch.save([layers.state_dict(), optimizer.state_dict()],"
    " file); file.seek(0); saved = torch.load(file); print([digest(v) for v in saved[0].values()],"
    " [digest(v) for s in saved[1]['state'].values() for v in s.values()])",
    "all is loaded": "layers.load_state_dict(first); optimizer.load_state_dict(states)",
    "it is evaluated": "with torch.no_grad(): print(digest(layers(batch)))",
    "it is evaluated in inference mode": "with torch.inference_mode():"
    " print(digest(layers(batch)))",
    "it is evaluated under autocast": "with torch.no_grad(), torch.autocast(batch.device.type,"
    " torch.bfloat16): print(digest(layers(batch)))",
    "a function transform": "print(digest(torch.func.grad(lambda w: torch.func.functional_call("
    "layers, {'38.weight': w}, (batch,)).pow(2).sum())(p.detach())))",
    "the storage is resized": "p.untyped_storage().resize_(2 * p.nbytes); print(digest(p))",
    "the step is made once more": "optimizer.step()",
    "another thread reads": "import threading; t = threading.Thread(target=lambda:"
    " print(digest(p))); t.start(); t.join()",
    "a scripted function reads": "print(digest(scripted(p, layers[39].bias)))",
    "a hook of the user's": "",
}


@pytest.mark.parametrize(("device", "conf"), ON)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_comes_after_a_step_sees_it_made(tmp_path, between, device, conf):
    script = f"""
@torch.jit.script
def scripted(weight, bias):
    return torch.sigmoid((weight + bias) * 2) * bias

optimizer = adamw()
if {between!r} == "a hook of the user's":
    optimizer.register_step_post_hook(lambda *_: print(digest(layers[38].weight)))
average = [p.detach().clone() for p in layers.parameters()]
print(step(optimizer))
first = copy.deepcopy(layers.state_dict())
states = copied(optimizer.state_dict())
for i in range(5):
    backward()
    before = deferred()
    optimizer.step()
    waited = deferred() - before
    p, state = layers[38].weight, optimizer.state[layers[38].weight]
    {BETWEEN[between]}
    optimizer.zero_grad()
if _C is not None:
    assert waited >= 14, waited
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, conf, device=device)


def test_an_address_that_is_given_out_has_the_update(tmp_path):
    script = """
import ctypes, numpy
def read(address):
    return list((ctypes.c_float * 4).from_address(address))
optimizer = adamw()
take = [
    lambda p: read(p.data_ptr()),
    lambda p: read(p.untyped_storage().data_ptr()),
    lambda p: p.detach().numpy()[0, :4].tolist(),
    lambda p: torch.from_dlpack(p.detach())[0, :4].tolist(),
    lambda p: p.detach()[0, :4].tolist(),
]
for i in range(7):
    print(step(optimizer))
    if i >= 2:
        layer = layers[37 + i % 3]
        print(take[i - 2](layer.weight), take[i - 2](layer.bias.view(1, -1)))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_an_address_that_was_given_out_before_has_the_update(tmp_path):
    # What is too small to be managed, or is another's memory, may be looked at by anyone.
    script = """
import ctypes, numpy
array = numpy.full((WIDTH, WIDTH), 0.01, dtype=numpy.float32)
layers[37].weight = nn.Parameter(torch.from_numpy(array))
optimizer = adamw()
numbers = layers[38].bias.detach().numpy()
tensor = torch.from_dlpack(layers[37].bias.detach())
part = layers[36].bias.untyped_storage()[0:64]
address = layers[39].bias.data_ptr()
weight = layers[36].weight.detach().numpy()
for i in range(5):
    print(step(optimizer))
    print(numbers[:4], tensor[:4].tolist(), list(part), array[0, :4], weight[0, :4])
    print(list((ctypes.c_float * 4).from_address(address)))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_who_looks_at_each_call_sees_all(tmp_path):
    script = """
from torch.overrides import TorchFunctionMode
class Dry(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch._fused_adamw_:
            return None
        return function(*args, **(kwargs or {}))
class Kept(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch._fused_adamw_:
            return None
        return super().__torch_function__(function, types, args, kwargs or {})
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
with Dry():
    print(step(optimizer))
with torch.device(DEVICE):
    before = deferred()
    print(step(optimizer))
if _C is not None:
    assert deferred() - before >= 14
layers[38].weight = Kept(layers[38].weight.detach().clone())
optimizer = torch.optim.AdamW([layers[38].weight], lr=1e-3, fused=True)
print(step(optimizer))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_weights_can_be_swapped(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
other = nn.Parameter(torch.ones_like(layers[38].weight))
torch.utils.swap_tensors(other, layers[38].weight)
print(digest(other), step(optimizer))
torch.__future__.set_swap_module_params_on_conversion(True)
layers.double().float()
print(step(optimizer))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_numbers_next_to_zero_are_those_of_the_step(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    step(optimizer)
backward()
for p in layers.parameters():
    p.grad.fill_(1e-18)
optimizer = adamw()
optimizer.step()
torch.set_flush_denormal(True)
moment = optimizer.state[layers[38].weight]["exp_avg_sq"]
moment.neg()
torch.set_flush_denormal(False)
print(moment[0, 0].item())
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_what_saves_without_an_operator_has_the_updates(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
last = torch.jit.script(nn.Sequential(layers[38], layers[39]))
for i in range(3):
    print(step(optimizer))
    if i == 0:
        buffer = io.BytesIO()
        torch.jit.save(last, buffer)
    elif i == 1:
        torch.jit.save(last, "last.pt")
        buffer = "last.pt"
    else:
        buffer = io.BytesIO()
        with torch.package.PackageExporter(buffer) as package:
            package.save_pickle("weights", "last.pkl", layers[38].weight.detach())
    if i < 2:
        if i == 0:
            buffer.seek(0)
        print([digest(p) for p in torch.jit.load(buffer).parameters()])
    else:
        buffer.seek(0)
        print(digest(torch.package.PackageImporter(buffer).load_pickle("weights", "last.pkl")))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_a_child_has_the_updates(tmp_path):
    script = """
import os
optimizer = adamw()
for i in range(5):
    print(step(optimizer), flush=True)
if os.fork() == 0:
    print([digest(p) for p in layers.parameters()], flush=True)
    os._exit(0)
os.wait()
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_scaled_steps_and_skipped_ones_have_the_same_bits(tmp_path):
    script = """
optimizer = adamw()
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
for i in range(8):
    loss = layers(batch).pow(2).mean()
    scaler.scale(loss * (float("inf") if i == 4 else 1)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(loss.item().hex(), scaler.get_scale())
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_versions_are_those_of_a_step_made_at_once(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    step(optimizer)
loss = layers(batch).pow(2).mean()
for p in layers.parameters():
    p.grad = torch.ones_like(p)
versions = [p._version for p in layers.parameters()]
optimizer.step()
print([p._version - v for p, v in zip(layers.parameters(), versions)])
print([optimizer.state[p]["exp_avg"]._version for p in layers.parameters()])
try:
    loss.backward()
    print("no error")
except RuntimeError as error:
    print("modified by an inplace operation" in str(error))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_two_optimizers_of_one_weight_take_turns(tmp_path):
    script = """
one, other = adamw(), torch.optim.SGD(layers[30:].parameters(), lr=1e-2, fused=True)
for i in range(5):
    print(backward())
    one.step(); other.step(); one.step()
    one.zero_grad()
finish(one)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_weights_that_are_not_used_again_have_theirs(tmp_path):
    script = """
optimizer = adamw()
short = layers[:5]
for i in range(6):
    print(step(optimizer, layers if i < 3 else short))
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_memory_goes_with_the_model(tmp_path):
    script = """
import weakref
def train():
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(40)]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for i in range(4):
        print(step(optimizer, model))
    if _C is not None:
        assert deferred() > 24
        assert _C.storages()
    kept = model[38].weight.detach()
    del model, optimizer
    gc.collect()
    return kept
print(digest(train()))
gc.collect()
left = sum(entry[1] for entry in _C.storages()) if _C is not None else 0
# The first model and the batch.
assert left <= 10 * 2**20 + batch.nbytes, left
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_memory_goes_with_the_optimizer(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
if _C is not None:
    assert stats()["waiting_updates"] >= 14
del optimizer
gc.collect()
if _C is not None:
    assert stats()["waiting_updates"] == 0
    left = sum(entry[1] for entry in _C.storages())
    assert left <= 10 * 2**20 + batch.nbytes, left
print([digest(p) for p in layers.parameters()])
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_a_run_that_fits_makes_steps_at_once(tmp_path):
    script = """
optimizer = adamw()
for i in range(6):
    print(step(optimizer))
finish(optimizer, least=0)
if _C is not None:
    assert deferred() == 0, stats()
"""
    run_both(tmp_path, MODEL + script, "vram:512MiB,min_storage:128KiB")


def test_it_can_be_switched_off(tmp_path):
    script = """
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
finish(optimizer, least=0)
if _C is not None:
    assert deferred() == 0 and stats()["evicted_bytes"] > 0, stats()
"""
    run_both(tmp_path, MODEL + script, UNDER + ",late_updates:0")


def test_a_run_that_grows_and_shrinks_has_the_same_bits(tmp_path):
    script = """
optimizer = adamw()
def steps(count):
    for i in range(count):
        print(step(optimizer))
steps(3)
big = [torch.ones(2**20, device=DEVICE) for _ in range(20)]
steps(4)
print(digest(big[3]))
del big
steps(5)
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, "vram:50MiB,min_storage:128KiB")


EXTENSION = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "foreign", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_foreign() { return PyModule_Create(&definition); }
"""


@pytest.fixture
def foreign(tmp_path):
    """A folder with a module that is built against torch: it needs libc10 and does nothing."""
    source, module = tmp_path / "foreign.cpp", tmp_path / "foreign.so"
    source.write_text(EXTENSION)
    libraries = pathlib.Path(torch.__file__).parent / "lib"
    include = sysconfig.get_path("include")
    command = ["g++", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(module)]
    command += ["-Wl,--no-as-needed", f"-L{libraries}", "-lc10"]
    subprocess.run(command, check=True)
    return tmp_path


def test_nothing_waits_for_kernels_that_nobody_announces(tmp_path, foreign):
    # A function of such a module may take any weight's address. Loading it makes all updates, and
    # from then on they are made at once.
    script = f"""
import ctypes, sys
sys.path.insert(0, {str(foreign)!r})
optimizer = adamw()
for i in range(4):
    print(step(optimizer))
before = deferred()
print(step(optimizer))
waited = deferred() - before
if _C is not None:
    assert waited >= 14 and not _C.foreign_kernels_loaded()
    assert stats()["waiting_updates"] > 0
import foreign
if _C is not None:
    assert stats()["waiting_updates"] == 0
print(digest(layers[38].weight))
before = deferred()
for i in range(3):
    print(step(optimizer))
if _C is not None:
    assert _C.foreign_kernels_loaded() and deferred() == before, stats()
finish(optimizer)
"""
    run_both(tmp_path, MODEL + script, UNDER)


def test_an_update_that_fails_stops_the_run(tmp_path):
    # Two moments for one weight, which the operator refuses.
    script = """
optimizer = adamw()
for i in range(4):
    step(optimizer)
moment = optimizer.state[layers[38].weight]["exp_avg"]
grad, other = torch.ones_like(moment), torch.ones_like(moment)
with torch.no_grad():
    lists = [layers[38].weight], [grad], [moment], [moment, moment], [], [torch.ones(())]
    done = _C.defer_update("_fused_adamw_", lists, dict(lr=0.1, beta1=0.9, beta2=0.9,
        weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False))
assert done
try:
    for i in range(2):
        print(backward())
except RuntimeError as error:
    print("stopped:", str(error).splitlines()[0])
try:
    layers[38].weight.grad, layers[39].weight.grad = grad, other
    optimizer.step()
except RuntimeError as error:
    print("stopped again")
"""
    result = run_real(tmp_path, MODEL + script, UNDER)
    words = result.stdout.split("\n")
    assert words[0].startswith("stopped: trainstream: an optimizer's update"), result
    assert "late_updates:0" in words[0] and words[1] == "stopped again", result
