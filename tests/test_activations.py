"""What is saved for backward leaves early and comes back early: the same bits in every mode."""

import functools
import pathlib
import tempfile

import pytest
from real_runner import DEVICES, needs_extension, on_gpu, run_both, run_real

pytestmark = needs_extension

# Storages of 256 KiB, of which a step saves some 40; a budget that holds all of them, so that what
# leaves does so ahead of need, and one that does not.
ROOMY, TIGHT = "vram:64MiB", "vram:7MiB"
BUDGETS = [
    pytest.param("sim", ROOMY, id="roomy"),
    pytest.param("sim", TIGHT, id="tight"),
    on_gpu("cuda", "vram:64MiB"),
]

PRELUDE = """
import gc
from torch import nn
from torch.utils import checkpoint
from trainstream import spill_activations as spill

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x):
        a, b = self.up(self.norm(x)).view(2, -1, 256).unbind(0)   # Views of one storage.
        return x + self.down(torch.cat([nn.functional.gelu(a), b * a]))

def model(blocks=5):
    torch.manual_seed(1)
    return nn.Sequential(*[Block() for _ in range(blocks)]).to(DEVICE)

def batch(seed=0):
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(seed)).to(DEVICE)

def show(name, *tensors):
    print(name, *[digest(t) for t in tensors])

def grads(net):
    return [p.grad for p in net.parameters()]

def at_baseline():
    gc.collect()
    torch.ones(1, device=DEVICE).add_(1)
    if _C is None:
        return
    if DEVICE == "cuda":  # Torch keeps 32 MiB for cuBLAS for each thread that multiplied.
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
    now = stats()
    for name in ("resident_bytes", "cold_bytes", "host_in_use_bytes"):
        assert now[name] == 0, (name, now)
    assert now["failures"] == 0, now
"""

# Each is the body of a function; `show` prints what must be the same bits as without.
MODES = {
    "plain": """
        net = model()
        for seed in range(3):
            with spill(share=1):
                loss = net(batch(seed)).square().mean()
            loss.backward()
        show("plain", loss, *grads(net))
    """,
    "shares": """
        for share in (0, 0.5, "auto"):
            net = model()
            with spill(share, min_size="100KiB"):
                loss = net(batch()).square().mean()
            loss.backward()
            show(share, loss, *grads(net))
    """,
    "decorator": """
        net = model()

        @spill(share=1)
        def forward(x):
            return net(x).square().mean()

        for seed in range(2):
            forward(batch(seed)).backward()
        show(forward.__name__, *grads(net))
    """,
    "backward inside, and nested": """
        net = model()
        with spill(share=1), spill(share=0.5):
            net(batch()).square().mean().backward()
        show("inside", *grads(net))
    """,
    "several graphs in any order": """
        net = model()
        with spill(share=1):
            losses = [net(batch(seed)).square().mean() for seed in range(3)]
        for i in (1, 0, 2):
            losses[i].backward()
        show("order", *losses, *grads(net))
    """,
    "retain_graph": """
        net = model()
        with spill(share=1):
            loss = net(batch()).square().mean()
        for _ in range(2):
            loss.backward(retain_graph=True)
        loss.backward()
        show("retained", *grads(net))
    """,
    "create_graph": """
        net = model(3)
        x = batch().requires_grad_()
        with spill(share=1):
            y = net(x)
            first, = torch.autograd.grad(y.square().mean(), x, create_graph=True)
            second = torch.autograd.grad(first.square().sum(), list(net.parameters()))
        show("double", first, *second)
        x = batch().requires_grad_()
        with spill(share=1):
            y = net(x)
        first, = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), list(net.parameters()))
        show("double, outside", first, *second)
    """,
    "checkpoint": """
        for reentrant in (False, True):
            net = nn.Sequential(model(), nn.Dropout(0.3))
            x = batch().requires_grad_()
            with spill(share=1):
                h = net[0][0](x)
                h = checkpoint.checkpoint(
                    nn.Sequential(net[0][1], net[1], net[0][2]), h, use_reentrant=reentrant)
                loss = net[0][3:](h).square().mean()
            loss.backward()
            show(f"checkpoint {reentrant}", loss, x.grad, *[g for g in grads(net) if g is not None])
        net = model()

        @spill(share=1)
        def inner(x):
            return net[1:3](x)

        h = checkpoint.checkpoint(inner, net[0](batch()), use_reentrant=False)
        h.square().mean().backward()
        show("inside a checkpoint", *[g for g in grads(net) if g is not None])
    """,
    "autocast": """
        net = model()
        device = torch.device(DEVICE).type
        with spill(share=1), torch.autocast(device, torch.bfloat16):
            loss = net(batch()).float().square().mean()
        loss.backward()
        show("autocast", loss, *grads(net))
    """,
    "no_grad and inference forwards in between": """
        net = model()
        with spill(share=1):
            h = net[:3](batch())
            with torch.no_grad():
                show("no_grad", net(batch(1)))
            with torch.inference_mode():
                show("inference", net(batch(2)))
            loss = net[3:](h).square().mean()
        with torch.no_grad():
            show("no_grad", net(batch(1)))
        loss.backward()
        show("after", *grads(net))
    """,
    "functions that read saved tensors twice": """
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):
                y = (x @ w).tanh()
                ctx.save_for_backward(x, w, y)
                return y

            @staticmethod
            def backward(ctx, g):
                x, w, y = ctx.saved_tensors
                h = g * (1 - y * y)
                x, w, y = ctx.saved_tensors
                return h @ w.t(), x.t() @ h

        w = (torch.eye(256) + 0.1 * torch.randn(
            256, 256, generator=torch.Generator().manual_seed(2))).to(DEVICE).requires_grad_()
        with spill(share=1):
            h = batch()
            for _ in range(6):
                h = Twice.apply(h, w)
        h.sum().backward()
        show("twice", h, w.grad)
    """,
    "functions that write": """
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.mark_dirty(x)
                x.mul_(2)
                ctx.save_for_backward(x)
                return x

            @staticmethod
            def backward(ctx, g):
                x, = ctx.saved_tensors
                return x.mul_(0.5).sin_() * g   # As fused losses do with their logits.

        w = batch(3).requires_grad_()
        with spill(share=1):
            h = batch() @ w
            for _ in range(4):
                h = Doubled.apply(h + 0.5).tanh()
        h.sum().backward()
        show("written", h, w.grad)
    """,
    "the user's own hooks": """
        net = model()
        calls = []
        def coarse(t):
            calls.append(t.shape)
            return t.detach().bfloat16() if t.dtype == torch.float32 else t.detach()
        def back(t):
            return t.float() if t.dtype == torch.bfloat16 else t
        hooks = torch.autograd.graph.saved_tensors_hooks
        with spill(share=1):
            h = net[:2](batch())
            with hooks(coarse, back):
                h = net[2](h)
            loss = net[3:](h).square().mean()
        loss.backward()
        show(len(calls), *grads(net))
        net = model()
        with hooks(coarse, back), spill(share=1):
            loss = net(batch()).square().mean()
        loss.backward()
        show(len(calls), *grads(net))
        net = model()
        with torch.autograd.graph.save_on_cpu(), spill(share=1):
            loss = net(batch()).square().mean()
        loss.backward()
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"), spill(share=1):
            net(batch()).square().mean().backward()
        show("refused", *grads(net))
    """,
    "exceptions and graphs that are dropped": """
        net = model()
        def fail(*_):
            raise KeyError("in the middle")
        handle = net[3].register_forward_hook(fail)
        for _ in range(2):
            try:
                with spill(share=1):
                    net(batch())
            except KeyError as error:
                print(error)
        handle.remove()
        with spill(share=1):
            dropped = net(batch(1))
            kept = net(batch())
        del dropped
        kept.square().mean().backward()
        show("kept", *grads(net))
        for step in range(3):
            with spill(share=1):
                loss = net(batch(step)).square().mean()
            if step == 1:
                break
            loss.backward()
        show("left early", *grads(net))
    """,
    "threads": """
        import threading
        net, results = model(), {}

        def work(seed):
            for _ in range(2):
                with spill(share=1):
                    loss = net(batch(seed)).square().mean()
                results[seed] = torch.autograd.grad(loss, list(net.parameters()))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for t in threads: t.start()
        for t in threads: t.join()
        for seed in range(3):
            show(seed, *results[seed])
        with spill(share=1):
            loss = net(batch()).square().mean()
        t = threading.Thread(target=loss.backward)   # Saved by one thread, used by another.
        t.start()
        t.join()
        show("other", *grads(net))
    """,
    "sparse, integers, convolutions, recurrent": """
        torch.manual_seed(4)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
                            nn.MaxPool2d(2)).to(DEVICE)
        table = nn.Embedding(50, 256, sparse=True).to(DEVICE)
        lstm = nn.LSTM(256, 128, batch_first=True).to(DEVICE)
        ids = torch.arange(400, device=DEVICE).remainder(50).view(8, 50)
        images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(5)).to(DEVICE)
        with spill(share=1):
            a = net(images).square().mean()
            b = lstm(table(ids))[0].square().mean()
        (a + b).backward()
        show("mixed", a, b, *grads(net), *grads(lstm), table.weight.grad.coalesce().values())
    """,
    "subclasses, nested and complex tensors": """
        from torch.utils._pytree import tree_map

        class Wrapped(torch.Tensor):
            @staticmethod
            def __new__(cls, inner):
                return torch.Tensor._make_wrapper_subclass(
                    cls, inner.shape, dtype=inner.dtype, device=inner.device)

            def __init__(self, inner):
                self.inner = inner

            @classmethod
            def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
                inner = lambda v: v.inner if isinstance(v, Wrapped) else v
                result = function(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
                return tree_map(lambda v: Wrapped(v) if isinstance(v, torch.Tensor) else v, result)

        w = Wrapped(batch()).requires_grad_()
        with spill(share=1):
            h = w * 2
            y = h.sin() * h
        y.sum().backward()
        show(type(w.grad).__name__, w.grad.inner)
        with spill(share=1):
            h = w * 2
            y = h.sin()
        h.add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            print("by an inplace operation" in str(error))
        ragged = torch.nested.nested_tensor(
            [batch()[:100], batch()[100:]], layout=torch.jagged, requires_grad=True)
        with spill(share=1):
            y = (ragged * 2).sin().cos()
        y.values().sum().backward()
        show("nested", ragged.grad.values())
        z = torch.complex(batch(), batch(1)).requires_grad_()
        with spill(share=1):
            y = (z * z.conj()).real.square().sum()
        y.backward()
        show("complex", z.grad)
    """,
}


def script_of(modes):
    bodies = []
    for i, body in enumerate(modes):
        bodies.append(f"def mode_{i}():{body}\nmode_{i}()\nat_baseline()\n")
    return PRELUDE + "\n".join(bodies)


@functools.cache
def plain_modes(device):
    """What the modes print without trainstream."""
    with tempfile.TemporaryDirectory() as folder:
        script = script_of(MODES.values())
        return run_real(pathlib.Path(folder), script, None, device=device, seconds=120).stdout


@pytest.mark.parametrize(("device", "conf"), BUDGETS)
def test_every_mode_has_the_same_bits_and_leaves_nothing_behind(tmp_path, device, conf):
    script = script_of(MODES.values())
    script += """
assert stats()["spilled_bytes"] > 20 << 20, stats()
# A GPU may be behind the host, and then nothing has left yet.
assert stats()["returned_bytes"] > (10 << 20 if DEVICE == "cpu" else -1), stats()
"""
    settings = f"{conf},min_storage:64KiB,verify:1"
    under = run_real(tmp_path, script, settings, device=device, seconds=120)
    assert under.stdout == plain_modes(device) != ""


def test_a_change_after_saving_is_torchs_error(tmp_path):
    script = (
        PRELUDE
        + """
w = batch(3).requires_grad_()

def changed(name, forward, change):
    with spill(share=1):
        kept = forward()
    evict_all()
    change(kept)
    for _ in range(2):
        try:
            kept[-1].sum().backward(retain_graph=True)
            print(name, "no error", digest(w.grad))
        except RuntimeError as error:
            text = str(error)
            print(name, "modified by an inplace operation: [" in text, "at version" in text)

def hidden():
    h = batch() @ w
    return h, h.sigmoid()

def product():
    h = batch() @ w
    return h, (h * h)[:5].exp()

changed("input", product, lambda kept: kept[0].add_(1))
changed("a view", product, lambda kept: kept[0][3:].zero_())
changed("output", hidden, lambda kept: kept[1].mul_(2))
changed("its own view", product, lambda kept: kept[1][0].mul_(2))
def weight(_):
    with torch.no_grad():
        w.add_(1)

changed("a parameter", lambda: (w.sin(),), weight)
changed("nothing that was saved", hidden, lambda kept: kept[0].add_(1))
changed("behind torch's back", product, lambda kept: kept[0].data.zero_())
small = torch.ones(3, device=DEVICE, requires_grad=True)
changed("something small", lambda: (small.exp(),), lambda kept: kept[0].add_(1))
"""
    )
    result = run_both(tmp_path, script, f"{ROOMY},min_storage:64KiB")
    assert result.stdout.count("True True") == 12 and result.stdout.count("no error") == 4


@pytest.mark.parametrize("device", DEVICES)
def test_only_what_nothing_else_holds_leaves(tmp_path, device):
    """Exactly these storages, whatever views of them were saved, and how often."""
    script = """
    import torch
    from torch import nn
    from trainstream import spill_activations
    net = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).to(DEVICE)
    frozen = torch.randn(512, 512, device=DEVICE)
    x = torch.randn(512, 512, device=DEVICE, requires_grad=True)
    tail = torch.ones(512, 512, device=DEVICE, requires_grad=True)

    def spilled():
        for _ in range(50):
            tail.add(1)                # Operators end; kernels and copies have the time to.
        (torch.cuda.synchronize if DEVICE == "cuda" else (lambda: None))()
        tail.add(1)
        return stats()["spilled_bytes"] >> 20

    with spill_activations(share=1):
        kept = [net[0].weight.t().matmul(x), nn.functional.linear(x, frozen), x @ frozen[:, :256]]
        hidden = net[0](x)
        kept += [hidden.sin(), net(x)]
        print(spilled(), is_cold(net[0].weight), is_cold(frozen), is_cold(x), is_cold(hidden))
        del hidden
        print(spilled(), stats()["cold_bytes"] >> 20)
        h = x * 2                      # In parts, three times, by two nodes.
        kept += [h[:256].exp() * h[256:], h.t().cos()]
        del h
        print(spilled() - 2)
    print(sum(k.sum() for k in kept).backward(), stats()["returned_bytes"] > 0)
    """
    result = run_real(tmp_path, script, "vram:200MiB,min_storage:1MiB", device=device)
    lines = result.stdout.splitlines()
    # BatchNorm's input is the first; what sin() was given follows once the script has let go of it.
    assert lines[0] == "1 False False False False"
    assert lines[1] == "2 2"
    assert lines[2] == "1"
    assert lines[3] == "None True"


def test_graphs_are_freed_without_the_garbage_collector(tmp_path):
    script = (
        PRELUDE
        + """
x = batch().requires_grad_()
gc.disable()
with spill(share=1):
    for forward in (torch.exp, torch.sigmoid, torch.tanh, lambda t: t.view(-1)[9:].sin().relu_()):
        forward(x * 2)
        evict_all()
del x
torch.ones(1).add_(1)
now = stats()
print(now["resident_bytes"] + now["cold_bytes"] + now["host_in_use_bytes"])
"""
    )
    assert run_real(tmp_path, script, f"{ROOMY},min_storage:64KiB").stdout == "0\n"


def test_copies_that_fail_leave_their_storages_where_they_are(tmp_path):
    script = (
        PRELUDE
        + """
if _C is not None:
    _C.sim_faults(3, 2**62)
net = model(8)
for seed in range(4):
    with spill(share=1):
        loss = net(batch(seed)).square().mean()
    loss.backward()
show("grads", loss, *grads(net))
del net, loss
gc.collect()
if _C is not None:
    now = stats()
    assert now["failures"] > 5 and now["spilled_bytes"] > 10 << 20, now
    assert now["resident_bytes"] + now["cold_bytes"] + now["host_in_use_bytes"] == 0, now
"""
    )
    run_both(tmp_path, script, f"{ROOMY},min_storage:64KiB")


TRAINING = """
net = model(10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
spilled = []
for step in range(6):
    with spill():
        loss = net(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
    spilled.append(stats().get("spilled_bytes", 0) >> 10)
show("net", *net.parameters())
"""


def test_auto_leaves_a_run_that_fits_alone(tmp_path):
    run_both(tmp_path, PRELUDE + TRAINING + "assert not any(spilled), spilled", ROOMY)


def test_auto_takes_as_much_as_the_last_step_had_too_much(tmp_path):
    script = (
        PRELUDE
        + TRAINING
        + """
if _C is not None:
    each = [after - before for before, after in zip(spilled, spilled[1:])]
    assert spilled[0] == 0 and min(each[1:]) > 1024, spilled
    assert max(each) < 8 << 10, spilled    # Not all of the 10 MiB.
"""
    )
    run_both(tmp_path, script, "vram:12MiB,min_storage:64KiB")


def test_steps_of_random_lengths_lock_no_more_memory(tmp_path):
    script = (
        PRELUDE
        + """
import random
net, lengths = model(6), random.Random(3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
for step in range(30):
    rows = 256 if step < 2 else 2 * lengths.randrange(32, 129)
    with spill(share=(0.5, 1, 1)[step % 3] if step >= 2 else 1):
        loss = net(batch(step)[:rows]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    now = stats()
    if step == 1:
        early = now
for name in ("page_locks", "growths", "page_locked_bytes"):
    assert now[name] == early[name] > 0, (name, early, now)
assert now["spilled_bytes"] > 60 << 20 and now["plans"] == 0, now
"""
    )
    run_real(tmp_path, script, f"{ROOMY},min_storage:64KiB")


@pytest.mark.parametrize(("value", "low", "high"), [("all", 10, 14), ("0.5", 5, 7), ("off", 0, 0)])
def test_the_variable_takes_a_share_of_everything(tmp_path, value, low, high):
    script = (
        PRELUDE
        + """
net = model(10)
net(batch()).square().mean().backward()
print(stats()["spilled_bytes"] / 2**20)
"""
    )
    result = run_real(tmp_path, script, f"{ROOMY},min_storage:64KiB,activations:{value}")
    assert low <= float(result.stdout) <= high


def test_compiled_blocks_have_the_same_bits(tmp_path):
    script = (
        PRELUDE
        + """
net = model(4)
compiled = [torch.compile(block, backend="aot_eager") for block in net]

@torch.compile(backend="aot_eager")
def whole(x):
    with spill(share=1):
        return net[0](x) * 2

for seed in range(2):
    with spill(share=1):
        h = batch(seed)
        for block in compiled:
            h = block(h)
    (h.square().mean() + whole(h.detach()).sum()).backward()
show("compiled", *grads(net))
del net, compiled, whole, h
if _C is not None:
    assert stats()["spilled_bytes"] > 2 << 20, stats()
"""
    )
    run_both(tmp_path, script, f"{ROOMY},min_storage:64KiB", preload=())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("spill_activations(share=1.5)", "ValueError bad value 1.5 for share; allowed: auto"),
        ("spill_activations(-1.0)", "ValueError bad value -1.0 for share"),
        ("spill_activations('most')", "ValueError bad value 'most' for share"),
        ("spill_activations(True)", "ValueError bad value True for share"),
        ("spill_activations(min_size='big')", "ValueError bad value 'big' for min_size"),
        ("spill_activations(min_size=-1)", "ValueError bad value -1 for min_size"),
        ("spill_activations()(3)", "TypeError trainstream.spill_activations() decorates"),
        ("spill_activations()(generator)", "TypeError trainstream.spill_activations() decorates"),
    ],
)
def test_bad_arguments_are_one_clear_error(call, words):
    from trainstream import spill_activations

    def generator():
        yield

    with pytest.raises((TypeError, ValueError)) as caught:
        eval(call, {"spill_activations": spill_activations, "generator": generator})
    text = f"{type(caught.value).__name__} {caught.value}"
    assert text.startswith(words) and "\n" not in text
