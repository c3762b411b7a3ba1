"""trainstream.optim against torch.optim, and against itself wherever it runs."""

import copy
import gc
import io
import math
import threading
import warnings

import pytest
import torch
from real_runner import exit_numbers, needs_extension, run_real
from torch import nn

pytestmark = needs_extension

# The bound on parameters after 20 steps, relative to the largest of their tensor: both are fp32,
# and differ in the order of a few roundings.
RELATIVE = 3e-7


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def optim():
    import trainstream.optim

    return trainstream.optim


def small_model(dtype=torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(33, 65), nn.Tanh(), nn.LayerNorm(65), nn.Linear(65, 7)).to(dtype)


def backward(model: nn.Module, seed: int, scale: float = 1.0) -> torch.Tensor:
    """In double precision, gradients in the parameters' own: what a library's order of additions
    adds to them differs between processors, and steps of 0.01 make that grow beyond RELATIVE."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(19, 33, generator=torch.Generator().manual_seed(seed)).to(dtype).double()
    exact = {name: parameter.double() for name, parameter in model.named_parameters()}
    loss = torch.func.functional_call(model, exact, (x,)).square().mean().float() * scale
    loss.backward()
    return loss.detach()


def train(model, optimizer, steps=20, first=0, each=None):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        if each is not None:
            each()
    return model


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_close(ours, theirs, relative=RELATIVE):
    for a, b in zip(ours, theirs, strict=True):
        error = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)
        assert error <= relative, f"relative error {error:.2e}"


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


HYPER = [
    {},
    {"lr": 1e-2, "weight_decay": 0.0},
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    {"maximize": True},
    {"lr": torch.tensor(2e-3), "foreach": False},
]


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
@pytest.mark.parametrize("hyper", HYPER)
def test_twenty_steps_are_those_of_torch(name, hyper):
    ours, theirs = small_model(), small_model()
    train(ours, getattr(optim(), name)(ours.parameters(), **hyper))
    train(theirs, getattr(torch.optim, name)(theirs.parameters(), **hyper))
    assert_close(weights(ours), weights(theirs))


def test_large_steps_are_as_exact_as_those_of_torch():
    """At lr=0.03 differences of one rounding grow, in torch too: both against double precision."""
    options = {"lr": 3e-2, "weight_decay": 0.1}
    exact = small_model(torch.float64)
    train(exact, torch.optim.AdamW(exact.parameters(), **options))
    errors = []
    for module in (optim(), torch.optim):
        model = small_model()
        train(model, module.AdamW(model.parameters(), **options))
        errors.append(
            [
                ((a.double() - b).abs().max() / b.abs().max()).item()
                for a, b in zip(weights(model), weights(exact), strict=True)
            ]
        )
    assert max(errors[0]) <= 2 * max(errors[1])


def test_is_an_optimizer_of_torch():
    model = small_model()
    optimizer = optim().AdamW(model.parameters())
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(optimizer, optim().Adam)  # As torch.optim.AdamW is a torch.optim.Adam.
    assert optimizer.param_groups[0]["decoupled_weight_decay"]
    assert optimizer.moment_dtype is torch.float32
    assert optimizer.engine == "host"
    assert "AdamW" in repr(optimizer)


SCHEDULERS = {
    "LambdaLR": lambda o, s: s.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o, s: s.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o, s: s.StepLR(o, 3),
    "MultiStepLR": lambda o, s: s.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o, s: s.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o, s: s.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o, s: s.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o, s: s.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o, s: s.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o, s: s.PolynomialLR(o, 8),
    "CyclicLR": lambda o, s: s.CyclicLR(o, 1e-4, 1e-2, 3, cycle_momentum=True),
    "OneCycleLR": lambda o, s: s.OneCycleLR(o, 1e-2, 12),
    "SequentialLR": lambda o, s: s.SequentialLR(
        o, [s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)], [4]
    ),
    "ChainedScheduler": lambda o, s: s.ChainedScheduler([s.ExponentialLR(o, 0.9), s.StepLR(o, 2)]),
    "ReduceLROnPlateau": lambda o, s: s.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o, s: torch.optim.swa_utils.SWALR(o, 1e-4, 4),
}


def test_every_scheduler_of_torch_is_here():
    from torch.optim import lr_scheduler

    known = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type)
        and issubclass(value, lr_scheduler.LRScheduler)
        and value.__module__ == lr_scheduler.__name__
        and not name.startswith("_")
    }
    assert known - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_gives_what_it_gives_torch(name):
    results = []
    for module in (optim(), torch.optim):
        model = small_model()
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = SCHEDULERS[name](optimizer, torch.optim.lr_scheduler)
            metric = [1.0] if name == "ReduceLROnPlateau" else []
            train(model, optimizer, 10, each=lambda s=scheduler, m=metric: s.step(*m))
        results.append((weights(model), [g["lr"] for g in optimizer.param_groups]))
    assert results[0][1] == results[1][1]
    assert_close(results[0][0], results[1][0])


def test_groups_frozen_parameters_and_parameters_without_gradient():
    results = []
    for module in (optim(), torch.optim):
        model = small_model()
        parts = [model[0], model[2], model[3]]
        optimizer = module.AdamW(parts[0].parameters(), lr=1e-2)
        unused = nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [*parts[1].parameters(), unused], "lr": 1e-3})
        train(model, optimizer, 4)
        parts[0].bias.requires_grad_(False)
        optimizer.zero_grad()
        train(model, optimizer, 4, 4)
        parts[0].bias.requires_grad_(True)
        optimizer.add_param_group({"params": parts[2].parameters(), "weight_decay": 0.5})
        train(model, optimizer, 4, 8)
        assert torch.equal(unused, torch.ones(5))
        results.append(weights(model))
    assert_close(*results)


def test_odd_parameters():
    def make():
        torch.manual_seed(3)
        return [
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.randn(0, 4)),
            nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(7, 9).t()),
            nn.Parameter(torch.randn(10, 10)[:, ::2]),
            nn.Parameter(torch.randn(2049)),
        ]

    results = []
    for module in (optim(), torch.optim):
        params = make()
        optimizer = module.AdamW(params, lr=1e-2)
        for step in range(5):
            g = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=g)
            optimizer.step()
        results.append([p.detach() for p in params])
    assert_close([p for p in results[0] if p.numel()], [p for p in results[1] if p.numel()])


def test_closure_runs_with_gradients_on_and_its_loss_comes_back():
    model = small_model()
    optimizer = optim().AdamW(model.parameters())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model, 0)

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_accumulated_gradients(steps):
    results = []
    for module in (optim(), torch.optim):
        model = small_model()
        optimizer = module.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):
            for micro in range(steps):
                backward(model, step * steps + micro, 1 / steps)
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    assert_close(*results)


def test_clipping_by_the_user_and_by_the_optimizer():
    def run(module, clip, **options):
        model = small_model()
        optimizer = module.AdamW(model.parameters(), **options)
        for step in range(10):
            optimizer.zero_grad()
            backward(model, step, 1e3)
            clip(model.parameters())
            optimizer.step()
        return weights(model), optimizer

    by_norm = lambda params: nn.utils.clip_grad_norm_(params, 0.5)  # noqa: E731
    by_value = lambda params: nn.utils.clip_grad_value_(params, 0.1)  # noqa: E731
    for clip in (by_norm, by_value):
        assert_close(run(optim(), clip)[0], run(torch.optim, clip)[0])
    ours, optimizer = run(optim(), lambda params: None, max_grad_norm=0.5)
    assert_close(ours, run(torch.optim, by_norm)[0])
    assert optimizer.grad_norm > 0.5


def test_norm_is_that_of_torch_and_of_no_gradient_that_is_not_finite():
    model = small_model()
    optimizer = optim().AdamW(model.parameters(), max_grad_norm=1e9)
    backward(model, 0)
    expected = nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])
    optimizer.step()
    assert math.isclose(optimizer.grad_norm, expected.item(), rel_tol=1e-12)
    model[0].weight.grad[3, 3] = float("inf")
    optimizer.step()
    assert not math.isfinite(optimizer.grad_norm)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_overflowed_steps_and_unscales_the_others(fused):
    results = []
    for module in (optim(), torch.optim):
        model = small_model()
        optimizer = module.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(19, 33, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(x).square().mean()).backward()
            before = weights(model)
            if step == 3:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            if step == 3:
                assert_equal(weights(model), before)
        results.append((weights(model), scaler.get_scale()))
    assert results[0][1] == results[1][1]
    assert_close(results[0][0], results[1][0])


def test_tied_weights_have_one_master():
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head).to(torch.bfloat16)
    optimizer = optim().AdamW(model.parameters(), lr=1e-2)
    model(torch.arange(50)).float().square().mean().backward()
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 1
    assert head.weight is embedding.weight


# --- Half precision ---


def fp32_twin(model):
    twin = small_model()
    with torch.no_grad():
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.copy_(q)
    return twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_fp32_training_on_the_same_gradients(dtype):
    """Weights in half precision are the rounded masters, whose training is that of fp32."""
    model = small_model(dtype)
    twin = fp32_twin(model)
    ours = optim().AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    for step in range(20):
        ours.zero_grad()
        backward(model, step)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.float()
        ours.step()
        theirs.step()
    masters = [state["master"] for state in ours.state_dict()["state"].values()]
    assert_close(masters, weights(twin))
    for p, master in zip(model.parameters(), masters, strict=True):
        ulp = torch.finfo(dtype).eps * master.abs() + torch.finfo(dtype).smallest_normal
        assert ((p.float() - master).abs() <= ulp / 2 * 1.01).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_weights_changed_by_others(dtype):
    model = small_model(dtype)
    optimizer = optim().AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 5)
    values = [torch.randn_like(p) for p in model.parameters()]
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.data.copy_(value)  # No version is counted for this.
    for state, value in zip(optimizer.state_dict()["state"].values(), values, strict=True):
        assert torch.equal(state["master"], value.float())
    optimizer.zero_grad()
    train(model, optimizer, 1, 5)
    for state, p in zip(optimizer.state_dict()["state"].values(), model.parameters(), strict=True):
        assert ((state["master"] - p.float()).abs() <= torch.finfo(dtype).eps * p.abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_swap_with_averages_and_back_changes_no_bit(dtype):
    def run(swap):
        model = small_model(dtype)
        optimizer = optim().AdamW(model.parameters(), lr=1e-3)
        for step in range(6):
            train(model, optimizer, 1, step)
            if swap:
                saved = [p.detach().clone() for p in model.parameters()]
                for p in model.parameters():
                    p.data.mul_(0.5)
                for p, s in zip(model.parameters(), saved, strict=True):
                    p.data.copy_(s)
        return weights(model)

    assert_equal(run(True), run(False))


def test_moments_in_bfloat16_are_close_and_the_same_each_time():
    def run(**options):
        model = small_model()
        return weights(train(model, optim().AdamW(model.parameters(), lr=1e-3, **options)))

    first, second = run(moments="bfloat16"), run(moments="bfloat16")
    assert_equal(first, second)
    assert any(not torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    # A step moves a weight by about lr; a moment in bfloat16 is off by 1/256 at most each time.
    assert all((a - b).abs().max() < 20 * 1e-3 / 50 for a, b in zip(first, run(), strict=True))
    other = run(moments="bfloat16", seed=1)
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_moments_are_chosen_by_the_room_there_is(monkeypatch):
    from trainstream.optim import adamw

    for left, expected in ((10**12, torch.float32), (1000, torch.bfloat16)):
        extension = adamw._extension()
        monkeypatch.setattr(extension, "host_bytes_left", lambda like, left=left: left)
        model = small_model()
        assert optim().AdamW(model.parameters()).moment_dtype is expected


# --- Engines ---


def test_instruction_sets_and_thread_counts_agree():
    import trainstream.optim.adamw as module

    extension = module._extension()
    results = {}
    try:
        for name in ("scalar", "AVX2", "AVX-512"):
            for threads in (1, 2, 7):
                try:
                    extension.set_host_engine(threads, name)
                except RuntimeError as fault:
                    assert "AVX" in str(fault)
                    continue
                assert extension.host_engine_threads() == threads
                for dtype in (torch.float32, torch.bfloat16):
                    model = small_model(dtype)
                    optimizer = optim().AdamW(
                        model.parameters(), moments="bfloat16", max_grad_norm=0.1
                    )
                    train(model, optimizer, 5)
                    results.setdefault(dtype, []).append(weights(model))
    finally:
        extension.set_host_engine(0, "")
    for runs in results.values():
        assert len(runs) >= 3
        for run in runs[1:]:
            assert_equal(run, runs[0])


# --- Updates during backward ---


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_during_backward_change_no_bit(steps, dtype):
    def run(**options):
        model = small_model(dtype)
        optimizer = optim().AdamW(model.parameters(), lr=1e-2, moments="bfloat16", **options)
        for step in range(6):
            for micro in range(steps):
                backward(model, step * steps + micro)
            early = options.get("accumulation_steps") is not None
            assert all((p.grad is None) == early for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        assert sum(optimizer.share) == sum(p.numel() for p in model.parameters())
        return weights(model)

    assert_equal(run(accumulation_steps=steps), run())


def test_fewer_gradients_than_promised_are_used_by_step():
    def run(**options):
        model = small_model()
        optimizer = optim().AdamW(model.parameters(), **options)
        train(model, optimizer, 3)
        return weights(model)

    assert_equal(run(accumulation_steps=4), run())


def test_more_gradients_than_promised_are_an_error():
    model = small_model()
    optimizer = optim().AdamW(model.parameters(), accumulation_steps=1)
    backward(model, 0)
    optimizer.synchronize()  # Or autograd may find first that an update wrote what it had saved.
    with pytest.raises(RuntimeError, match="accumulation_steps is 1"):
        backward(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_fault_of_an_early_update_is_raised_by_step():
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = optim().AdamW(embedding.parameters(), accumulation_steps=1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse gradients"):
        optimizer.step()


def test_clipping_and_checkpoints_with_the_promise():
    def run(resume, **options):
        model = small_model(torch.bfloat16)
        optimizer = optim().AdamW(model.parameters(), max_grad_norm=0.1, **options)
        train(model, optimizer, 3)
        if resume:
            optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
        train(model, optimizer, 3, 3)
        return weights(model)

    assert_equal(run(False, accumulation_steps=1), run(False))
    assert_equal(run(True, accumulation_steps=1), run(False))


def test_thread_of_early_updates_ends_with_its_optimizer():
    before = set(threading.enumerate())  # Those of earlier tests may end meanwhile.
    model = nn.Linear(512, 512)  # Smaller weights are updated in step().
    optimizer = optim().AdamW(model.parameters(), accumulation_steps=1)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    (worker,) = set(threading.enumerate()) - before
    del model, optimizer
    gc.collect()
    worker.join(timeout=5)
    assert not worker.is_alive()


# --- Checkpoints ---


def through_a_file(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_resumed_run_equals_an_unbroken_one(dtype, moments, optimizer_first):
    def make():
        model = small_model(dtype)
        groups = [
            {"params": model[0].parameters(), "lr": 1e-2},
            {"params": [*model[2].parameters(), *model[3].parameters()], "weight_decay": 0.2},
        ]
        return model, optim().AdamW(groups, lr=1e-3, moments=moments)

    whole, optimizer = make()
    train(whole, optimizer, 12)
    first, optimizer = make()
    train(first, optimizer, 6)
    saved = through_a_file((first.state_dict(), optimizer.state_dict()))
    second, optimizer = make()
    loads = [lambda: second.load_state_dict(saved[0]), lambda: optimizer.load_state_dict(saved[1])]
    for load in reversed(loads) if optimizer_first else loads:
        load()
    train(second, optimizer, 6, 6)
    assert_equal(weights(second), weights(whole))


@pytest.mark.parametrize("direction", ["to torch", "from torch"])
def test_checkpoints_of_torch(direction):
    modules = (optim(), torch.optim) if direction == "to torch" else (torch.optim, optim())
    model = small_model()
    optimizer = modules[0].AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    train(model, optimizer, 6)
    other = small_model()
    other.load_state_dict(model.state_dict())
    resumed = modules[1].AdamW(other.parameters())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    assert resumed.param_groups[0]["lr"] == 1e-2
    train(other, resumed, 6, 6)
    whole = small_model()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=0.3), 12)
    assert_close(weights(other), weights(whole))


def test_checkpoint_of_another_model_is_refused():
    model, other = small_model(), nn.Linear(3, 3)
    saved = train(model, optim().AdamW(model.parameters()), 1) and None
    optimizer = optim().AdamW(model.parameters())
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group|parameter group"):
        optim().AdamW(other.parameters()).load_state_dict(saved)
    saved["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"exp_avg has shape \(2, 2\).*\(65, 33\)"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_go_on_alone(dtype):
    model = small_model(dtype)
    optimizer = optim().AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(twin, twin_optimizer, 3, 3)
    train(model, optimizer, 3, 3)
    assert_equal(weights(twin), weights(model))


def test_parameters_that_became_others():
    """A model moved to another type goes on: moments stay, masters are the new weights."""
    model = small_model()
    optimizer = optim().AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 3)
    model.to(torch.bfloat16)
    optimizer.zero_grad()
    train(model, optimizer, 3, 3)
    assert all(int(s["step"]) == 6 for s in optimizer.state.values())
    assert all("master" in s for s in optimizer.state_dict()["state"].values())


# --- Bad input ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "gpu"}, "engine.*auto, host, stream, hybrid"),
        ({"moments": "int8"}, "moments.*auto, float32, bfloat16"),
        ({"max_grad_norm": -1}, "max_grad_norm.*above 0"),
        ({"accumulation_steps": 0}, "accumulation_steps.*1, 2"),
        ({"accumulation_steps": 1.5}, "accumulation_steps.*1, 2"),
        ({"amsgrad": True}, "amsgrad"),
        ({"capturable": True}, "capturable"),
        ({"differentiable": True}, "differentiable"),
        ({"lr": -1.0}, "learning rate"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        optim().AdamW(small_model().parameters(), **options)


def test_gradients_that_are_not_supported_change_nothing():
    good = nn.Parameter(torch.ones(4))
    sparse = nn.Embedding(10, 3, sparse=True)
    optimizer = optim().AdamW([good, sparse.weight])
    (sparse(torch.tensor([1, 2])).sum() + good.sum()).backward()
    with pytest.raises(RuntimeError, match="sparse gradients.*SparseAdam"):
        optimizer.step()
    double = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = optim().AdamW([good, double])
    (double.sum() + good.sum()).backward()
    with pytest.raises(RuntimeError, match="float64"):
        optimizer.step()
    assert torch.equal(good, torch.ones(4))


# --- On the simulated device ---

MODEL = """
import trainstream.optim
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(dtype)
optimizer = trainstream.optim.AdamW(model.parameters(), lr=1e-3, moments=moments, **options)
for step in range(6):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(dtype)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
    print(step, [digest(p) for p in model.parameters()])
print([digest(s["exp_avg"]) + digest(s["master"]) if "master" in s else digest(s["exp_avg"])
       for s in optimizer.state_dict()["state"].values()])
print(optimizer.share, file=sys.stderr)
if trainstream.is_enabled():
    elements = sum(p.numel() for p in model.parameters())
    print("bytes a parameter", stats()["optimizer_bytes"] / elements, file=sys.stderr)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_simulated_device_gives_the_bits_of_plain_tensors(tmp_path, dtype, moments):
    head = f"dtype, moments, options = torch.{dtype}, {moments!r}, dict(max_grad_norm=0.3)\n"
    # Weights, gradients and activations need about 18 MiB in float32, half in bfloat16.
    plain = run_real(tmp_path, head + MODEL, None)
    vram = "8MiB" if dtype == "float32" else "4MiB"
    under = run_real(tmp_path, head + MODEL, f"vram:{vram},min_storage:64KiB,verify:1")
    assert under.stdout == plain.stdout
    numbers = exit_numbers(under)
    assert numbers["evicted"] > 0
    assert numbers["peak"] <= numbers["budget"]
    # Two moments and the remainder; the rest is checksums (4 bytes a tile) and what rounds up.
    formula = 2 * (4 if moments == "float32" else 2) + (2 if dtype == "bfloat16" else 0)
    a_parameter = float(under.stderr.split("bytes a parameter ")[1].split()[0])
    assert formula <= a_parameter <= 1.01 * formula


REPLACED = """
from torch.optim import AdamW
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(torch.bfloat16)
optimizer = {name}(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
print([digest(p) for p in model.parameters()])
print(type(optimizer).__module__, optimizer.engine, optimizer.moment_dtype, file=sys.stderr)
"""


def test_variable_replaces_the_optimizers_of_an_unmodified_script(tmp_path):
    plain = run_real(
        tmp_path,
        "import trainstream.optim\n" + REPLACED.format(name="trainstream.optim.AdamW"),
        None,
    )
    for name in ("AdamW", "torch.optim.AdamW"):
        under = run_real(
            tmp_path, REPLACED.format(name=name), "vram:4MiB,optimizer:auto,moments:float32"
        )
        assert under.stdout == plain.stdout
        assert "trainstream.optim.adamw host torch.float32" in under.stderr
    stock = run_real(tmp_path, REPLACED.format(name="AdamW").rsplit("print", 1)[0], "vram:4MiB")
    assert stock.stdout != plain.stdout


# --- On a GPU ---

# Gradients are made on the CPU, so that no other kernel's bits matter. The largest parameter is cut
# into chunks that both sides take; clipping adds squares on the GPU.
ENGINE_RUN = """
import trainstream.optim
def run(device, engine, dtype, moments):
    sizes = [(1001, 5003), (17,), (2048,), (3, 5, 7), (1,), (6001, 1000)]
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).to(dtype).to(device)) for s in sizes]
    optimizer = trainstream.optim.AdamW(
        params, lr=1e-2, engine=engine, moments=moments, max_grad_norm=1.0, seed=3)
    shares = []
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(dtype).to(device)
        optimizer.step()
        if step == 1:
            params[0].data.mul_(0.5)  # From outside: masters follow.
        shares.append(optimizer.share)
    optimizer.synchronize()
    saved = optimizer.state_dict()["state"].values()
    bits = [digest(p) for p in params]
    bits += [digest(s[k]) for s in saved for k in ("exp_avg", "exp_avg_sq", "master") if k in s]
    return bits, shares

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for moments in ("float32", "bfloat16"):
        expected, _ = run("cpu", "host", dtype, moments)
        for engine in ("host", "stream", "hybrid"):
            bits, shares = run("cuda", engine, dtype, moments)
            print(dtype, moments, engine, bits == expected)
            print(shares, file=sys.stderr)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("conf", [None, "vram:64MiB,verify:1"])
def test_engines_agree_on_a_gpu(tmp_path, conf):
    """Without the pager, and where storages are cold when the step begins."""
    result = run_real(tmp_path, ENGINE_RUN, conf, device="cuda", seconds=300)
    lines = result.stdout.splitlines()
    assert len(lines) == 18
    assert all(line.endswith("True") for line in lines), result.stdout
    if conf is not None:
        assert exit_numbers(result)["evicted"] > 0


ALIASED_RUN = """
import threading
import trainstream.optim
def run(device, engine, seed=0):
    g = torch.Generator().manual_seed(seed)
    flat = torch.randn(3_000_000, generator=g).to(torch.bfloat16).to(device)
    params = [torch.nn.Parameter(flat), torch.nn.Parameter(flat[:2_000_000].view(2000, 1000))]
    optimizer = trainstream.optim.AdamW(params, lr=1e-2, engine=engine)
    for step in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).to(torch.bfloat16).to(device)
        optimizer.step()
    return digest(flat)

expected = [run("cpu", "host", seed) for seed in range(4)]
for engine in ("host", "stream", "hybrid"):
    found = {}
    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[seed] = run("cuda", engine, seed)
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(engine, [found[seed] for seed in range(4)] == expected)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_threads_and_parameters_over_one_memory_on_a_gpu(tmp_path):
    """Optimizers of several threads and streams share staging memory; parameters, their bytes."""
    result = run_real(tmp_path, ALIASED_RUN, None, device="cuda", seconds=200)
    assert result.stdout == "host True\nstream True\nhybrid True\n"
