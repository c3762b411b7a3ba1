"""Multi-tensor optimizer steps in pieces: split where they must be, and the same bits."""

from textwrap import dedent

import pytest
from real_runner import exit_numbers, needs_extension, run_both, run_real

pytestmark = needs_extension

# Parameters, gradients and states of one optimizer below come to 0.5 to 1.2 MiB.
SMALL = "vram:512KiB,min_storage:1024"
LARGE = "vram:256MiB,min_storage:1024"

SETUP = """
import inspect
from torch import optim
from trainstream import _foreach
from trainstream._foreach import Counts

SHAPES = [(64, 96), (7,), (128, 64), (1, 33), (64, 64), (), (96, 40), (5, 6, 7), (300,), (40, 96)]

def parameters(dtypes, seed=0, shapes=SHAPES):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype))
        for dtype in dtypes for shape in shapes
    ]

def give_gradients(params, step):
    g = torch.Generator().manual_seed(1000 + step)
    for p in params:
        real = torch.view_as_real(p) if p.is_complex() else p
        grad = torch.randn(real.shape, generator=g).to(real.dtype)
        p.grad = torch.view_as_complex(grad) if p.is_complex() else grad

def digest_all(tensors):
    text = " ".join(digest(t) if isinstance(t, torch.Tensor) else str(t) for t in tensors)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

def train(name, make, dtypes=(torch.float32, torch.bfloat16), steps=4, shapes=SHAPES):
    \"\"\"Two groups of different learning rates; prints every state.\"\"\"
    params = parameters(dtypes, shapes=shapes)
    half = len(params) // 3
    groups = [dict(params=params[:half], lr=0.05), dict(params=params[half:])]
    optimizer = make(groups)
    calls, pieces = Counts.calls, Counts.pieces
    for step in range(steps):
        give_gradients(params, step)
        optimizer.step()
    made[name] = (Counts.calls - calls, Counts.pieces - pieces)
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    print(name, digest_all(params), digest_all(states))

# Two runs of torch 2.11's fused SGD differ in bfloat16 momentum buffers, without us too.
FUSED = {"SGD": dict(dtypes=(torch.float32, torch.float64))}

made = {}  # By name: calls of torch's functions, and into how many they were split.
def assert_split(steps=4):
    if _C is not None:
        for name, (calls, pieces) in made.items():
            assert calls == 2 * steps and pieces >= 2 * calls, (name, calls, pieces)
"""

# Each with what makes it keep every state that it can have.
OPTIMIZERS = """
CASES = {
    "Adadelta": [dict(weight_decay=0.1)],
    "Adafactor": [dict(weight_decay=0.1, eps=(1e-8, 1e-3))],
    "Adagrad": [dict(lr_decay=0.1, weight_decay=0.1)],
    "Adam": [dict(), dict(amsgrad=True, weight_decay=0.1), dict(maximize=True)],
    "AdamW": [dict(), dict(amsgrad=True)],
    "Adamax": [dict(weight_decay=0.1), dict()],
    "ASGD": [dict(lr=0.05, t0=2)],
    "NAdam": [dict(weight_decay=0.1, decoupled_weight_decay=True)],
    "RAdam": [dict(weight_decay=0.1), dict(betas=(0.9, 0.5))],
    "RMSprop": [dict(centered=True, momentum=0.9), dict()],
    "Rprop": [dict(), dict(maximize=True)],
    "SGD": [
        dict(lr=0.1, momentum=0.9, weight_decay=0.1),
        dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
        dict(lr=0.1),
    ],
}
"""


def test_foreach_steps_in_pieces_give_the_bits_of_whole_ones(tmp_path):
    script = """
    for name, cases in CASES.items():
        for options in cases:
            make = lambda groups: getattr(optim, name)(groups, foreach=True, **options)
            # Scalars keep ASGD's lists whole.
            shapes = [shape for shape in SHAPES if shape or name != "ASGD"]
            train(f"{name} {options}", make, shapes=shapes)
    assert_split()
    # All that have the option, but those whose foreach is no multi-tensor function.
    having = {
        name for name, c in vars(optim).items()
        if inspect.isclass(c) and "foreach" in inspect.signature(c.__init__).parameters
    }
    assert having == set(CASES), having
    """
    result = run_both(tmp_path, SETUP + OPTIMIZERS + dedent(script), SMALL)
    assert exit_numbers(result)["evicted"] > 0


def test_fused_steps_in_pieces_give_the_bits_of_whole_ones(tmp_path):
    script = """
    having = [
        name for name, c in vars(optim).items()
        if inspect.isclass(c) and "fused" in inspect.signature(c.__init__).parameters
    ]
    for name in having:
        for options in CASES[name]:
            make = lambda groups: getattr(optim, name)(groups, fused=True, **options)
            train(f"{name} {options}", make, **FUSED.get(name, {}))
    assert len(having) >= 4 and "SGD" in having
    assert_split()
    """
    result = run_both(tmp_path, SETUP + OPTIMIZERS + dedent(script), SMALL)
    assert exit_numbers(result)["evicted"] > 0


def test_complex_parameters_in_pieces(tmp_path):
    script = """
    for name in sorted(set(CASES) - {"Adafactor", "SGD"}):
        make = lambda groups: getattr(optim, name)(groups, foreach=True, **CASES[name][0])
        train(name, make, [torch.complex64], shapes=SHAPES[:5])
    assert_split()
    """
    run_both(tmp_path, SETUP + OPTIMIZERS + dedent(script), SMALL)


def test_fused_step_with_grad_scaler_in_pieces(tmp_path):
    """The scale and the finding of infinity go to every piece; a skipped step changes nothing."""
    script = """
    for make in (
        lambda params: optim.AdamW(params, fused=True),
        lambda params: optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    ):
        params = parameters([torch.float32])
        optimizer = make(params)
        for step, infinite in enumerate([0.0, 1.0, 0.0]):
            give_gradients(params, step)
            optimizer.grad_scale = torch.tensor(4.0)
            optimizer.found_inf = torch.tensor(infinite)
            optimizer.step()
            print(digest_all(params))
        print(digest_all(v for p in params for v in optimizer.state[p].values()))
    assert _C is None or Counts.pieces > 2 * Counts.calls
    """
    run_both(tmp_path, SETUP + dedent(script), SMALL)


def test_lists_that_decide_something_as_a_whole_stay_whole(tmp_path):
    script = """
    F = torch.float32
    def step_of(name, params, optimizer, lose=()):
        for step in range(3):
            give_gradients(params, step)
            if step < 2:
                for i in lose:
                    params[i].grad = None
            if name == "sparse":
                for p in params:
                    p.grad = p.grad.to_sparse() if p.dim() == 2 and p.shape[0] == 64 else p.grad
            if name == "layout":
                params[0].grad = params[0].grad.t().contiguous().t()
            if name == "one gradient":
                for p in params[1:]:
                    p.grad = params[0].grad
            surplus = Counts.pieces - Counts.calls
            optimizer.step()
            if Counts.pieces - Counts.calls > surplus:
                split.append((name, step))
        print(name, digest_all(params))

    split = []
    # Adafactor's eps comes from the first dtype.
    params = parameters([torch.bfloat16, F])
    step_of("eps", params, optim.Adafactor(params, foreach=True))
    # Buffers that come later than the others.
    params = parameters([F])
    sgd = dict(lr=0.1, momentum=0.9, foreach=True)
    step_of("late", params, optim.SGD(params, **sgd), lose=(0, 5, 6))
    params = parameters([F])
    step_of("sparse", params, optim.Adagrad(params, foreach=True))
    params = parameters([F])
    step_of("layout", params, optim.AdamW(params, foreach=True))
    params = parameters([F], shapes=[(64, 96)] * 6)
    step_of("one gradient", params, optim.SGD(params, nesterov=True, **sgd))
    params = parameters([F])
    step_of("scalar", params, optim.ASGD(params, foreach=True))
    # Tied by its memory.
    w = torch.randn(64, 96)
    params = [torch.nn.Parameter(w), torch.nn.Parameter(w.t()), *parameters([F])]
    step_of("tied", params, optim.AdamW(params, foreach=True, weight_decay=0.3))
    # All buffers are there, or none, until the late ones come.
    assert split == ([("late", 0), ("late", 1)] if _C else []), split
    """
    run_both(tmp_path, SETUP + dedent(script), SMALL)


def test_step_that_fits_is_one_call_for_each_group(tmp_path):
    """Counted at the operators that a step calls once for each group and dtype."""
    script = """
    import collections
    from torch.overrides import TorchFunctionMode

    class Counter(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if "_foreach_" in function.__name__ or "_fused_" in function.__name__:
                count[function.__name__] += 1
            return function(*args, **kwargs or {})

    count = collections.Counter()
    with Counter():
        for name, options in [("AdamW", {}), ("SGD", dict(momentum=0.9)), ("Adagrad", {})]:
            for kind in ("foreach", "fused"):
                options[kind] = True
                make = lambda groups: getattr(optim, name)(groups, lr=0.1, **options)
                train(f"{name} {kind}", make, **FUSED.get(name, {}))
                del options[kind]
    print(sorted(count.items()))
    assert _C is None or Counts.pieces == Counts.calls == 2 * 4 * 6
    """
    run_both(tmp_path, SETUP + dedent(script), LARGE)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_steps_of_a_run_that_fits_are_whole_until_it_presses(tmp_path, kind):
    """Pieces of a budget of 256 MiB are 4 MiB, and the lists come to 24 MiB."""
    script = f"""
    params = [torch.nn.Parameter(torch.ones(2**17)) for _ in range(12)]
    optimizer = optim.AdamW(params, {kind}=True)

    def pieces_of_step(step):
        give_gradients(params, step)
        calls, pieces = Counts.calls, Counts.pieces
        optimizer.step()
        return (Counts.pieces - pieces) / max(1, Counts.calls - calls)

    pieces = [pieces_of_step(step) for step in range(6)]
    assert _C is None or (pieces[0] > 1 and pieces[-1] == 1 and not stats()["watching"]), pieces
    large = [torch.full((2**24,), float(i)) for i in range(5)]  # 320 MiB.
    pieces = pieces_of_step(6)
    assert _C is None or (pieces > 1 and stats()["watching"]), pieces
    print(digest_all(params), [t.sum().item() for t in large])
    """
    run_both(tmp_path, SETUP + dedent(script), "vram:256MiB,min_storage:1024")


def test_parameter_larger_than_a_piece_is_a_piece_alone(tmp_path):
    script = """
    params = [torch.nn.Parameter(torch.ones(size)) for size in (10, 2**18, 10, 10, 2**18)]
    optimizer = optim.AdamW(params, foreach=True)
    for step in range(3):
        give_gradients(params, step)
        optimizer.step()
    print(digest_all(params))
    assert _C is None or Counts.pieces == 3 * 4
    """
    run_both(tmp_path, SETUP + dedent(script), "vram:4MiB,min_storage:1024")


def test_temporaries_of_a_step_are_born_within_the_budget(tmp_path):
    """Adam's square roots are 6 MiB together, half a MiB a piece."""
    script = """
    if WHOLE:
        _foreach._PIECES_IN_BUDGET = 1e-9
    params = [torch.nn.Parameter(torch.ones(2**17)) for _ in range(12)]
    optimizer = optim.AdamW(params, foreach=True)
    for step in range(3):
        give_gradients(params, step)
        before = stats()["born_cold_bytes"]
        optimizer.step()
    print(stats()["born_cold_bytes"] - before)
    """

    def born_cold_bytes(whole):
        text = f"WHOLE = {whole}\n{SETUP}{dedent(script)}"
        return int(run_real(tmp_path, text, "vram:4MiB,min_storage:1024").stdout)

    assert born_cold_bytes(whole=True) >= 2**20
    assert born_cold_bytes(whole=False) == 0


def test_compiled_step_is_traced_as_without_us(tmp_path):
    script = """
    import torch._dynamo
    from torch._dynamo.utils import counters
    params = parameters([torch.float32])
    optimizer = optim.AdamW(params, foreach=True)
    step = torch.compile(optimizer.step, backend="eager")
    for i in range(2):
        give_gradients(params, i)
        step()
    print(digest_all(params), counters["graph_break"], counters["stats"]["unique_graphs"])
    assert Counts.calls == 0
    """
    run_both(tmp_path, SETUP + dedent(script), SMALL, preload=())
