"""What trainstream.optim does with odd gradients, parameters and states: what torch does."""

import copy
import warnings

import pytest
import torch
from real_runner import exit_numbers, needs_extension, run_real
from torch import nn

pytestmark = needs_extension


def optim():
    import trainstream.optim

    return trainstream.optim


def ones_like_grads(*params):
    for p in params:
        p.grad = torch.ones_like(p)


ODD_GRADS = {
    "expanded": lambda: torch.full((1,), 2.0).expand(6),
    "negated": lambda: torch._neg_view(torch.arange(6.0)),
    "zeros without memory": lambda: torch._efficientzerotensor(6),
    "strided": lambda: torch.arange(12.0)[::2],
}


@pytest.mark.parametrize("name", ODD_GRADS)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_that_are_not_what_lies_in_memory(name, clip):
    results = []
    for module in (optim(), torch.optim):
        p = nn.Parameter(torch.ones(6))
        options = {"max_grad_norm": clip} if module is not torch.optim else {}
        optimizer = module.AdamW([p], lr=0.1, **options)
        for _ in range(2):
            p.grad = ODD_GRADS[name]()
            if clip is not None and module is torch.optim:
                p.grad = p.grad.clone() + 0
                nn.utils.clip_grad_norm_([p], clip)
            optimizer.step()
        results.append(p.detach())
    assert torch.allclose(*results, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameter_whose_elements_are_negated(dtype):
    stored = torch.arange(1.0, 7.0, dtype=dtype)
    p = nn.Parameter(torch._neg_view(stored))
    optimizer = optim().AdamW([p], lr=0.0625, weight_decay=0.0)
    ones_like_grads(p)
    optimizer.step()
    assert torch.equal(stored, torch.arange(1.0, 7.0, dtype=dtype) + 0.0625)


def test_tensors_without_memory_of_their_own_are_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, shape):
            return torch.Tensor._make_wrapper_subclass(cls, shape)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return Wrapper(args[0].shape)

    plain = nn.Parameter(torch.ones(4))
    for odd, words in (
        (nn.Parameter(Wrapper((4,)), requires_grad=True), "plain tensors.*got Wrapper"),
        (nn.Parameter(torch.ones(4, device="meta")), "got parameters on meta"),
    ):
        optimizer = optim().AdamW([plain, odd])
        ones_like_grads(plain, odd)
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
    assert torch.equal(plain, torch.ones(4))


NO_ROOM = """
import trainstream.optim
from torch import nn
params = [nn.Parameter(torch.ones(n)) for n in (1 << 16, 1 << 16, 64 << 20)]
optimizer = trainstream.optim.AdamW(params, moments="float32")
for p in params:
    p.grad = torch.ones_like(p)
try:
    optimizer.step()
except RuntimeError as fault:
    print("no host memory for an optimizer state" in str(fault))
print([float(optimizer.state[p]["step"]) for p in params[:2]])
print([bool((p == 1).all()) for p in params])
params[2].grad = None
optimizer.step()
print([float(optimizer.state[p]["step"]) for p in params[:2]])
"""


def test_step_without_room_for_its_states_is_no_step(tmp_path):
    result = run_real(tmp_path, NO_ROOM, "vram:1GiB,ram:100MiB")
    expected = ["True", "[0.0, 0.0]", "[True, True, True]", "[1.0, 1.0]"]
    assert result.stdout.splitlines() == expected


def test_parameter_twice_in_a_group_is_updated_twice():
    """With more elements than a piece of work, so that two threads could have met in it."""
    results = []
    for module in (optim(), torch.optim):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(300_000))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = module.AdamW([p, p], lr=1e-2)
        for _ in range(3):
            p.grad = torch.randn(p.shape)
            optimizer.step()
        assert int(optimizer.state[p]["step"]) == 6
        results.append(p.detach())
    assert torch.allclose(*results, rtol=1e-5, atol=1e-7)


FORKED = """
import os, threading, trainstream.optim
p = torch.nn.Parameter(torch.ones(1 << 19))  # 2 MiB: smaller ones are updated in step().
optimizer = trainstream.optim.AdamW([p], lr=0.125, weight_decay=0.0, accumulation_steps=1)
def step():
    p.sum().backward()
    optimizer.step()
    optimizer.state_dict()
step()
locked, forked = threading.Event(), threading.Event()
def holds_the_lock():  # As the optimizer's own thread may at any moment.
    with optimizer._early._queue._changed:
        locked.set()
        forked.wait()
threading.Thread(target=holds_the_lock).start()
locked.wait()
child = os.fork()
forked.set()
if child == 0:
    p.grad = torch.ones_like(p)
    optimizer.step()
    step()
    os._exit(int(p[0] * 8))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
step()
print(float(p[0]))
"""


def test_child_steps_though_it_has_no_thread_for_early_updates(tmp_path):
    result = run_real(tmp_path, FORKED, None, seconds=20)
    assert result.stdout.split() == ["5", "0.75"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_the_script_cleared_begins_anew(dtype):
    moved = []
    for clear in (True, False):
        p = nn.Parameter(torch.ones(6, dtype=dtype))
        optimizer = optim().AdamW([p], lr=0.0625, weight_decay=0.0)
        for _ in range(3 if clear else 0):
            ones_like_grads(p)
            optimizer.step()
        optimizer.state.clear()
        assert optimizer.state_dict()["state"] == {}
        with torch.no_grad():
            p.fill_(1.0)
        p.grad = -torch.ones_like(p)
        optimizer.step()
        moved.append(p.detach())
    assert torch.equal(*moved)


def test_states_of_replaced_parameters_are_given_back():
    optimizer = optim().AdamW([nn.Parameter(torch.ones(4))])
    for _ in range(4):
        p = nn.Parameter(torch.ones(4))
        optimizer.param_groups[0]["params"] = [p]
        optimizer.state.clear()
        ones_like_grads(p)
        optimizer.step()
    assert len(optimizer._slots) <= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_parameters_with_gaps_between_their_elements(dtype):
    wide = torch.randn(64, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    masters = []
    for p in (nn.Parameter(wide[:, ::2]), nn.Parameter(wide[:, ::2].clone())):
        optimizer = optim().AdamW([p], lr=1e-3)
        for _ in range(3):
            ones_like_grads(p)
            optimizer.step()
        masters.append(optimizer.state_dict()["state"][0]["master"])
        assert torch.equal(masters[-1].to(dtype), p)
    assert torch.equal(*masters)


def test_masters_of_parameters_that_became_others():
    for old, new, shape in (
        (torch.float32, torch.bfloat16, 6),
        (torch.bfloat16, torch.float32, 6),
        (torch.bfloat16, torch.float16, 6),
        (torch.float16, torch.bfloat16, 6),
        (torch.bfloat16, torch.bfloat16, 5000),
    ):
        p = nn.Parameter(torch.ones(6, dtype=old))
        optimizer = optim().AdamW([p], lr=1e-3)
        ones_like_grads(p)
        optimizer.step()
        p.grad = None
        p.data = torch.randn(shape).to(new)
        master = optimizer.state_dict()["state"][0].get("master")
        assert (master is None) == (new is torch.float32)
        assert master is None or torch.equal(master, p.float())


def test_options_of_groups_are_refused_like_those_of_the_optimizer():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for name in ("amsgrad", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=name):
            optim().AdamW([{"params": [p], name: True}])
    optimizer = optim().AdamW([p])
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.add_param_group({"params": [q], "amsgrad": True})
    assert len(optimizer.param_groups) == 1
    optimizer.param_groups[0]["amsgrad"] = True
    ones_like_grads(p)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.step()


def test_any_integer_is_a_seed():
    for seed in (-1, 2**64 - 1, 2**70):
        p = nn.Parameter(torch.ones(3))
        optimizer = optim().AdamW([p], moments="bfloat16", seed=seed)
        ones_like_grads(p)
        optimizer.step()


def test_counters_are_on_the_cpu_whatever_the_default_device():
    p = nn.Parameter(torch.ones(3))
    optimizer = optim().AdamW([p])
    ones_like_grads(p)
    with torch.device("meta"):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert float(optimizer.state[p]["step"]) == 2


def test_optimizer_that_torch_pickled_becomes_ours():
    """As under the variable, where torch.optim.AdamW names our class."""
    results = []
    for change in (False, True):
        p = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([p], lr=0.1)
        ones_like_grads(p)
        optimizer.step()
        if change:
            state, optimizer = optimizer.__getstate__(), optim().AdamW.__new__(optim().AdamW)
            optimizer.__setstate__(state)
        ones_like_grads(p)
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        results.append(p.detach())
    assert torch.allclose(*results, rtol=1e-6)


def test_step_inside_what_is_compiled():
    """In a function that is compiled, and with a compiled model in a closure."""
    results = []
    for compile_ in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        p = nn.Parameter(torch.ones(6))
        optimizer = optim().AdamW([p], lr=0.1)
        loss = compile_(lambda x, p=p: (x * p).square().sum())

        def closure(optimizer=optimizer, loss=loss):
            optimizer.zero_grad()
            value = loss(torch.arange(6.0))
            value.backward()
            return value

        def step(optimizer=optimizer, closure=closure):
            optimizer.step(closure)
            optimizer.step()

        compiled = compile_(step)
        for _ in range(3):
            compiled()
        results.append(p.detach())
    assert torch.equal(*results)


def stepped(dtype=torch.float32, **options):
    p = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = optim().AdamW([p], **options)
    ones_like_grads(p)
    optimizer.step()
    return p, optimizer


def test_hooks_of_state_dicts_see_all_and_may_change_it():
    _, optimizer = stepped(torch.bfloat16)
    seen = []
    optimizer.register_state_dict_post_hook(lambda _, d: seen.append("master" in d["state"][0]))
    optimizer.register_state_dict_post_hook(lambda _, d: {"renamed": d})
    saved = optimizer.state_dict()["renamed"]
    assert seen == [True]

    p, other = stepped(torch.bfloat16)
    before = other.state[p]["exp_avg"].clone()

    def rename(_, state_dict):
        first = state_dict["renamed"]["state"][0]
        states = {0: {**first, "exp_avg": first["exp_avg"] * 2}}
        return {**state_dict["renamed"], "state": states}

    other.register_load_state_dict_pre_hook(rename)
    other.register_load_state_dict_post_hook(
        lambda o: seen.append(torch.equal(o.state[p]["exp_avg"], before * 2))
    )
    for _ in range(2):
        other.load_state_dict({"renamed": saved})
    assert seen == [True] * 3


def test_checkpoint_that_is_refused_changes_nothing():
    p, optimizer = stepped(lr=1e-3)
    other = nn.Parameter(torch.ones(4))
    torchs = torch.optim.AdamW([other], lr=7.0, amsgrad=True)
    ones_like_grads(other)
    torchs.step()
    misfit = optimizer.state_dict()
    misfit["state"][0] = {**misfit["state"][0], "exp_avg": torch.ones(9)}
    misfit["param_groups"][0]["lr"] = 7.0
    for saved in (torchs.state_dict(), misfit):
        with pytest.raises(ValueError, match=r"amsgrad|shape \(9,\)"):
            optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert float(optimizer.state[p]["step"]) == 1


CHECKPOINT_UNDER_PRESSURE = """
import threading, trainstream.optim
from torch import nn
params = [nn.Parameter(torch.full((300, 300), float(i + 1)).bfloat16()) for i in range(8)]
optimizer = trainstream.optim.AdamW(params, lr=1e-2)
for p in params:
    p.grad = torch.ones_like(p)
optimizer.step()
done = False
def press():
    while not done:
        kept = [torch.full((200, 200), float(i)) for i in range(30)]
        assert all(float(t[-1, -1]) == i for i, t in enumerate(kept))
thread = threading.Thread(target=press)
thread.start()
for _ in range(40):
    saved = optimizer.state_dict()
    states = saved["state"].values()
    assert all(torch.equal(s["master"].bfloat16(), p) for s, p in zip(states, params))
    optimizer.load_state_dict(saved)
done = True
thread.join()
print("same")
"""


def test_checkpoints_while_another_thread_evicts(tmp_path):
    """Masters are joined and split where they lie, so they must stay there meanwhile."""
    result = run_real(tmp_path, CHECKPOINT_UNDER_PRESSURE, "vram:1MiB,min_storage:4KiB,verify:1")
    assert result.stdout.split() == ["same"]
    assert exit_numbers(result)["evicted"] > 0


def test_early_update_uses_the_learning_rate_of_backward():
    p = nn.Parameter(torch.ones(1 << 20))
    rate = torch.tensor(0.125)
    optimizer = optim().AdamW([p], lr=rate, weight_decay=0.0, accumulation_steps=1)
    for _ in range(5):
        p.sum().backward()
        rate.zero_()
        optimizer.step()
        rate.fill_(0.125)
    assert torch.allclose(p, torch.full_like(p, 1 - 5 * 0.125))


def test_gradient_set_after_an_early_update_is_an_error():
    """As DistributedDataParallel does, which averages after the hooks of accumulation."""
    p = nn.Parameter(torch.ones(4))
    optimizer = optim().AdamW([p], accumulation_steps=1)
    p.sum().backward()
    ones_like_grads(p)
    with pytest.raises(RuntimeError, match="DistributedDataParallel.*accumulation_steps at None"):
        optimizer.step()


def test_optimizer_goes_on_after_the_fault_of_an_early_update():
    embedding, head = nn.Embedding(10, 3, sparse=True), nn.Linear(3, 3)
    params = [*embedding.parameters(), *head.parameters()]
    optimizer = optim().AdamW(params, accumulation_steps=1)
    head(embedding(torch.tensor([1]))).sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    embedding.sparse = False
    optimizer.zero_grad()
    head(embedding(torch.tensor([1]))).sum().backward()
    optimizer.step()
    assert all(p.grad is None for p in params)


def test_parameter_that_left_the_optimizer_is_not_updated_early():
    p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = optim().AdamW([p], accumulation_steps=1)
    optimizer.param_groups[0]["params"] = [q]
    for _ in range(2):
        (p.sum() + q.sum()).backward()
        optimizer.step()
        p.grad = None
    assert torch.equal(p, torch.ones(4))
    assert int(optimizer.state[q]["step"]) == 2


def test_one_moment_removed_begins_anew_and_the_other_stays():
    p, optimizer = stepped(weight_decay=0.0)
    first = optimizer.state[p]["exp_avg"].clone()
    del optimizer.state[p]["exp_avg_sq"]
    p.grad = torch.zeros(4)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["exp_avg_sq"], torch.zeros(4))
    assert torch.allclose(optimizer.state[p]["exp_avg"], first * 0.9)


def test_copy_of_an_optimizer_waits_for_its_early_updates():
    for _ in range(5):
        p = nn.Parameter(torch.ones(1 << 20))
        optimizer = optim().AdamW([p], accumulation_steps=1)
        p.sum().backward()
        twin = copy.deepcopy(optimizer)
        assert [int(state["step"]) for state in twin.state.values()] == [1]


def test_parameters_that_share_their_memory_are_updated_one_after_the_other():
    """As where weights were tied through `.data`; in one piece of work two threads met in them."""
    results = []
    for module in (optim(), optim(), torch.optim):
        torch.manual_seed(0)
        memory = torch.randn(1 << 19)
        params = [nn.Parameter(memory), nn.Parameter(memory[100_000:])]
        optimizer = module.AdamW(params, lr=1e-2)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape)
            optimizer.step()
        results.append(memory)
    assert torch.equal(results[0], results[1])
    assert torch.allclose(results[0], results[2], rtol=1e-5, atol=1e-6)


def test_states_are_read_when_updates_are_done(monkeypatch):
    """A GPU's kernel may still write to moments in host memory when step() returns."""
    p, optimizer = stepped()
    calls = []
    monkeypatch.setattr(type(optimizer), "synchronize", lambda _: calls.append(1))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    copy.deepcopy(optimizer)
    assert len(calls) == 3
