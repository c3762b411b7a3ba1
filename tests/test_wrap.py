"""trainstream.wrap(): what is paged is said by the caller or by measured peaks; the bits stay.

Every script runs in a process of its own, which wrap() itself switches on where `conf` is None.
"""

import pathlib

import pytest
from real_runner import DEVICES, needs_extension, run_real

pytestmark = needs_extension

# Six blocks of 4.1 MB each, and a head; targets and batches from a seed.
STACK = """
from torch import nn

class Block(nn.Module):
    def __init__(self, n=512):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(n), nn.Linear(n, 1024), nn.Linear(1024, n)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

class Stack(nn.Module):
    def __init__(self, blocks=6, n=512):
        super().__init__()
        self.layers = nn.ModuleList(Block(n) for _ in range(blocks))
        self.head = nn.Linear(n, n)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def make(blocks=6, lr=1e-3):
    torch.manual_seed(7)
    model = Stack(blocks)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)

def batch(step, rows=32, n=512):
    g = torch.Generator().manual_seed(100 + step)
    return torch.randn(rows, n, generator=g), torch.randn(rows, n, generator=g)

def train_step(model, optimizer, step, rows=32):
    x, y = batch(step, rows)
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()

def weights(model):
    return [p.detach().clone() for p in model.parameters()]
"""


def test_blocks_paged_and_unpaged_between_steps_change_no_bit(tmp_path):
    """Against torch's AdamW, the unpaged run, and several patterns of moving blocks."""
    script = (
        STACK
        + """
from torch import nn
patterns = {
    "none": lambda pager, step: None,
    "all": lambda pager, step: [pager.page(i) for i in range(6)],
    "turns": lambda pager, step: (pager.page(step % 6), pager.unpage((step + 3) % 6)),
    "flip": lambda pager, step: [
        (pager.page if (step + i) % 2 else pager.unpage)(i) for i in range(6)],
}
model, optimizer = make()
stock = [train_step(model, optimizer, step) for step in range(8)]
stock_weights = weights(model)
results = {}
trainstream.enable(device="sim", vram="160MiB")
from trainstream import _C
for name, move in patterns.items():
    model, optimizer = make()
    keys = {"vram": "160MiB", "offload": True, "param_offload": False}
    same = trainstream.wrap(model, optimizer, "sim", **keys)
    assert same[0] is model and same[1] is optimizer
    assert isinstance(optimizer, trainstream.optim.AdamW)
    session = trainstream.session(model)
    losses, seen = [], set()
    for step in range(8):
        move(session.pager, step)
        seen.add(tuple(session.pager.paged))
        losses.append(train_step(model, optimizer, step))
        for i, layer in enumerate(model.layers):
            assert i in session.pager.paged or not is_cold(layer.up.weight)
        paged = [p for i in session.pager.paged for p in model.layers[i].parameters()]
        left = sum(4 * p.numel() for p in paged if _C.is_managed(p) and not is_cold(p))
        assert left <= 2 * max(session.pager.block_bytes), (name, step, left)
    assert (len(seen) > 1) == (name in ("turns", "flip"))
    results[name] = losses, weights(model)
    assert max(abs(a - b) for a, b in zip(losses, stock)) < 1e-4
    assert max((a - b).abs().max() for a, b in zip(weights(model), stock_weights)) < 2e-4
    sizes = session.pager.block_bytes
    assert session.pager.bytes_paged == sum(sizes[i] for i in session.pager.paged)
    trainstream.unwrap(model)
losses, end = results.pop("none")
for name, (other_losses, other_end) in results.items():
    assert other_losses == losses, name
    assert all(a.equal(b) for a, b in zip(end, other_end)), name
print(len(results), stats()["evicted_bytes"] > 0, stats()["restored_bytes"] > 0)
"""
    )
    assert run_real(tmp_path, script, None).stdout == "3 True True\n"


CAPPED = """
from torch import nn

class Pooled(nn.Module):
    # A batch is averaged down to 8 rows first, so that a larger one takes memory and little time.
    def __init__(self, n=1250):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(n, n, bias=False) for _ in range(8))

    def forward(self, x):
        x = x.tanh().view(8, -1, x.shape[-1]).mean(1)
        for layer in self.layers:
            x = x + layer(x).relu()
        return x

torch.manual_seed(7)
model = Pooled()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
trainstream.wrap(model, optimizer, "sim", vram=VRAM, offload=True)
session = trainstream.session(model)
pager, planner = session.pager, session.planner
assert pager.block_bytes == [12_500_000] * 8  # Half weights, half gradients.
counts = [len(pager.paged)]
for step in range(10):  # The first eight must do to settle.
    g = torch.Generator().manual_seed(step)
    rows = 8 if step < 8 else 8 * 600
    x = torch.randn(rows, 1250, generator=g)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
    counts.append(len(pager.paged))
    if step == 7:
        assert planner.done, [str(e) for e in session.events]
print(counts, file=sys.stderr)
print(*session.events, sep="\\n", file=sys.stderr)
if VRAM == "112MiB":
    settled = counts[8]
    assert counts[0] > settled > 0
    assert counts[-1] == settled + 1, counts
    assert [e.what for e in session.events].count("watchdog") == 1
    assert "settled" in [e.what for e in session.events]
else:
    assert set(counts) == {0}
"""


def test_capped_process_pages_by_measured_peaks_and_a_larger_batch_pages_one_more(tmp_path):
    runs = [run_real(tmp_path, f"VRAM = {v!r}\n{CAPPED}", None) for v in ("112MiB", "256MiB")]
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.splitlines()) == 10


def test_refuses_where_host_ram_is_short_and_takes_bf16_moments_where_only_they_fit(tmp_path):
    """Twelve million parameters in fp32: 96 MB of fp32 moments, 48 MB in bfloat16."""
    script = """
    from torch import nn
    model = nn.Sequential(*[nn.Linear(1000, 1000, bias=False) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    before = [p.data_ptr() for p in model.parameters()]
    limits = {"ram": "70MiB", "vram": "1GiB"}
    for keys in ({"moment_dtype": "float32"}, {"param_offload": True}):
        try:
            trainstream.wrap(model, optimizer, "sim", offload=True, **limits, **keys)
        except MemoryError as error:
            print(error)
        assert type(optimizer) is torch.optim.AdamW
        assert [p.data_ptr() for p in model.parameters()] == before
    trainstream.wrap(model, optimizer, "sim", ram="70MiB", vram="1GiB", offload=True)
    print(optimizer.moment_dtype)
    print([str(e).partition(": ")[2] for e in trainstream.session(model).events][-2:])
    trainstream.unwrap(model)
    trainstream.wrap(model, optimizer, "sim", moment_dtype="float32", offload=True,
                     check_memory=False)
    print(optimizer.moment_dtype, type(optimizer).__module__)
    """
    lines = run_real(tmp_path, script, None).stdout.splitlines()
    print(lines)
    assert "host RAM must hold 91.55 MiB (91.55 MiB of float32 moments and masters)" in lines[0]
    assert "the limit is 70.00 MiB. Raise ram by at least 21.55 MiB" in lines[0]
    assert "91.55 MiB of paged blocks" in lines[1]
    assert lines[2] == "torch.bfloat16"
    assert lines[-1] == "torch.float32 trainstream.optim.adamw"


# Models that are wrapped in one way or another, each against stock: `build()` gives the model,
# `loss_of(model, step)` a step's loss. Torch's fused step on the CPU has the host engine's
# arithmetic, so nothing may differ.
AGAINST_STOCK = """
import torch.nn.functional as F
from torch import nn

def compare(build, loss_of, *, steps=6, **keys):
    results = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        model = build()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        if wrapped:
            keys = {"vram": "256MiB", "offload": True, "param_offload": True, **keys}
            trainstream.wrap(model, optimizer, "sim", **keys)
        losses = []
        for step in range(steps):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, [p.detach().clone() for p in model.parameters()]))
    (stock, stock_weights), (ours, our_weights) = results
    assert stock == ours
    assert all(a.equal(b) for a, b in zip(stock_weights, our_weights))
    session = trainstream.session(model)
    assert stats()["evicted_bytes"] > 0 and len(session.pager.paged) > 0
    return model, optimizer, session

def rows(step, n=512, count=16):
    return torch.randn(count, n, generator=torch.Generator().manual_seed(step))
"""

LORA = """
class Low(nn.Module):
    # A frozen Linear and what is learned beside it, as peft has it.
    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 16)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()

class Layer(nn.Module):
    def __init__(self, n=512):
        super().__init__()
        self.up, self.down = Low(nn.Linear(n, 1024)), Low(nn.Linear(1024, n))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))

class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

from trainstream.optim import _convert
def build():
    return Trunk()

def loss_of(model, step):
    loss = model(rows(step)).square().mean()
    return loss

model, optimizer, session = compare(build, loss_of)
frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
big = [p for p in frozen.values() if p.numel() >= 2**18]
assert len(big) == 8
copies = lambda: {o: has for o, *_, has, locked in _C.storages()}
owner = lambda t: t.untyped_storage()._cdata
assert all(copies()[owner(p)] for p in big)  # Cold, or on the device with a copy.
assert all(p.grad is None for p in frozen.values())
assert not any(p in optimizer._slots or p in optimizer.state for p in frozen.values())
assert session.pager.block_bytes[0] < 4.6e6  # Of the frozen weights none has a gradient.
assert stats()["dropped_bytes"] > 0
for i in range(4):
    session.pager.unpage(i)
moved = stats()["dropped_bytes"] + stats()["evicted_bytes"]
assert not any(copies()[owner(p)] for p in big) and not any(map(is_cold, big))
loss_of(model, 9).backward()
assert stats()["dropped_bytes"] + stats()["evicted_bytes"] == moved
"""


def test_frozen_weights_have_a_host_copy_while_paged_and_none_while_resident(tmp_path):
    """LoRA by hand: no gradients, masters or moments of what is frozen, and stock's results."""
    script = (
        AGAINST_STOCK
        + "from trainstream import _switch\n"
        + LORA.replace(
            "model, optimizer, session = compare",
            "trainstream.enable(device='sim', vram='256MiB')\nfrom trainstream import _C\n"
            "model, optimizer, session = compare",
        )
    )
    run_real(tmp_path, script, None)


def test_peft_on_a_qwen2_shape_equals_stock(tmp_path):
    """Where peft is installed: its LoRA on tied embeddings, with and without autocast."""
    peft = pytest.importorskip("peft")
    script = (
        AGAINST_STOCK
        + f"sys.path.append({str(pathlib.Path(peft.__file__).parents[1])!r})"
        + """
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
config = Qwen2Config(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, vocab_size=1000, use_cache=False, tie_word_embeddings=True)
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)

def loss_of(model, step):
    x = torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(step))
    with torch.autocast("cpu", torch.bfloat16, enabled=CAST):
        return model(input_ids=x, labels=x).loss

for CAST in (False, True):
    model, optimizer, session = compare(
        lambda: get_peft_model(Qwen2ForCausalLM(config), lora), loss_of)
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert len(session.pager) == 3 and len(frozen) > 30
    assert all(p.grad is None and p not in optimizer._slots for p in frozen)
"""
    )
    run_real(tmp_path, script, None)


def test_paged_blocks_under_autocast_change_nothing_of_what_autograd_saves(tmp_path):
    """Casts that the script changes or lays out itself, torch's error for a saved tensor that was
    changed, graphs that are dropped, and what refuses saved-tensor hooks."""
    script = (
        AGAINST_STOCK
        + """
import gc, weakref
class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(768, 768) * 0.03)

    def forward(self, x):
        w = self.w.to(torch.bfloat16)
        with torch.no_grad():
            w.copy_((w * 8).round() / 8)  # The straight-through estimator of quantization.
        return F.linear(x.bfloat16(), w).float()

class Folded(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(192, 192, 3, 3) * 0.03)

    def forward(self, x):
        w = self.w.to(torch.bfloat16, memory_format=torch.channels_last)
        return F.conv2d(x.bfloat16(), w, padding=1).float()

def square(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x).square().mean()

trainstream.enable(device="sim", vram="256MiB", verify=True)
compare(lambda: nn.Sequential(Rounded(), Rounded()), lambda m, s: square(m, rows(s, 768)))
class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Linear(512, 512)  # Autocast casts it once for both, and adds gradients there.
        self.layers = nn.ModuleList(nn.Sequential(shared, nn.Linear(512, 512)) for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](x))

compare(Twice, lambda m, s: square(m, rows(s)))
image = torch.randn(1, 192, 8, 8)
compare(lambda: nn.Sequential(Folded(), Folded()), lambda m, s: square(m, image))

class Changed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(512, 512)

    def forward(self, x):
        gate = torch.sigmoid(self.a(x))
        out = gate * x
        gate.mul_(2)
        return out.float()

model = nn.Sequential(Changed(), Changed())
trainstream.wrap(model, None, param_offload=True, check_memory=False)
try:
    square(model, rows(0)).backward()
except RuntimeError as fault:
    assert "modified by an inplace operation" in str(fault)
else:
    raise AssertionError("torch raises here")
outputs = []
hook = model[0].a.register_forward_hook(lambda m, args, out: outputs.append(weakref.ref(out)))
square(model, rows(0))
gc.collect()
assert outputs[0]() is None
plain = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
trainstream.wrap(plain, None, param_offload=True, check_memory=False)
def of(parameters):
    return torch.func.functional_call(plain, parameters, rows(0)).square().mean()
with torch.autocast("cpu", torch.bfloat16):
    grads = torch.func.grad(of)({k: p.detach() for k, p in plain.named_parameters()})
assert len(grads) == 4
"""
    )
    run_real(tmp_path, script, None)


def test_wrapped_model_is_freed_with_its_last_name(tmp_path):
    script = (
        AGAINST_STOCK
        + """
import gc, time, weakref
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

trainstream.enable(device="sim", vram="64MiB")
for offload in (False, True):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    trainstream.wrap(model, optimizer, offload=offload, param_offload=True, check_memory=False)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step, 600)).square().mean().backward()
        optimizer.step()
    weight = weakref.ref(model.layers[0].weight)
    del model, optimizer
    for _ in range(1000):  # The last step's updates may still be on their way.
        gc.collect()
        if weight() is None:
            break
        time.sleep(0.01)
    assert weight() is None, offload
"""
    )
    run_real(tmp_path, script, None)


def test_tied_embeddings_and_plain_sequentials_equal_stock(tmp_path):
    script = (
        AGAINST_STOCK
        + """
from torch.utils.checkpoint import checkpoint
class Tied(nn.Module):
    def __init__(self, words=2000, n=256):
        super().__init__()
        self.embed = nn.Embedding(words, n)
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(n, 1200) for _ in range(2))
        self.narrow = nn.Linear(1200, n)
        self.head = nn.Linear(n, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        x = x + self.narrow(sum(wide(x) for wide in self.wide).relu())
        return self.head(x)

def words_step(model, step):
    x = torch.randint(0, 2000, (64,), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(x), x.roll(1))

model, optimizer, session = compare(Tied, words_step, blocks="wide")
assert model.head.weight is model.embed.weight and len(session.pager) == 2
inside = {id(t) for block in session.pager.blocks for t in block.tensors}
assert id(model.embed.weight) not in inside

def sequential():
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(640, 640), nn.GELU())])

def plain_step(model, step):
    return model(rows(step, 640)).square().mean()

model, optimizer, session = compare(sequential, plain_step)
assert session.pager.names == ["0", "2", "4", "6"]
model, optimizer, session = compare(sequential, plain_step, param_offload=0.5)
assert session.pager.paged == [1, 3]
model, optimizer, session = compare(sequential, plain_step, param_offload=[0, 3], prefetch_depth=0)
assert session.pager.paged == [0, 3]
model, optimizer, session = compare(sequential, plain_step, offload=False)
assert type(optimizer) is torch.optim.AdamW
"""
    )
    run_real(tmp_path, script, None)


RANKS = """
import tempfile
from torch import nn
import torch.distributed as dist

class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))
        self.odd = nn.Linear(600, 600)  # Used by rank 1 alone.
        self.never = nn.Linear(600, 600)

    def forward(self, x, odd):
        for layer in self.layers:
            x = layer(x).tanh()
        return x + self.odd(x) if odd else x

def batches(step, micro):
    g = torch.Generator().manual_seed(10 * step + micro)
    return torch.randn(WORLD, 8, 600, generator=g), torch.randn(WORLD, 8, 600, generator=g)

def train(model, optimizer, mine):
    losses = []
    for step in range(4):
        total = 0.0
        for micro in range(2):
            x, y = batches(step, micro)
            # Each rank's mean, averaged over the ranks: what one process sees as the joined batch.
            parts = [(model(x[r], r == 1) - y[r]).square().mean() for r in mine]
            loss = sum(parts) / len(parts) / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses

def one(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    model = Net(rank)  # Each begins elsewhere: rank 0's weights count.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainstream.wrap(model, optimizer, "sim", vram="24MiB", offload=True, param_offload=True,
                     max_grad_norm=CLIP, accumulation_steps=2)
    losses = train(model, optimizer, [rank])
    assert model.never.weight.grad is None and model.never.weight not in optimizer._slots
    assert [e.what for e in trainstream.session(model).events].count("distributed") == 1
    everyone = [None] * WORLD
    dist.all_gather_object(everyone, (losses, [digest(p) for p in model.parameters()]))
    assert len({str(weights) for _, weights in everyone}) == 1, "ranks differ"
    mean = [sum(values) / WORLD for values in zip(*(losses for losses, _ in everyone))]
    dist.barrier()
    dist.destroy_process_group()
    return mean, [p.detach().clone() for p in model.parameters()]

path = tempfile.mktemp()
children = []
for rank in range(1, WORLD):
    pid = os.fork()
    if pid == 0:
        try:
            one(rank, path)
            os._exit(0)
        except BaseException:
            import traceback; traceback.print_exc()
            os._exit(1)
    children.append(pid)
losses, ours = one(0, path)
assert all(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 for pid in children)
model = Net(0)
optimizer = trainstream.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=CLIP)
joined = train(model, optimizer, range(WORLD))
assert max(abs(a - b) for a, b in zip(losses, joined)) < 1e-5, (losses, joined)
worst = max((a - b).abs().max().item() for a, b in zip(ours, model.parameters()))
assert worst < 2e-4, worst
"""


@pytest.mark.parametrize(("world", "clip"), [(2, None), (2, 0.5), (4, None)])
def test_ranks_over_gloo_equal_one_process_with_the_joined_batch(tmp_path, world, clip):
    """Accumulated, paged, a parameter of one rank alone and one of none."""
    run_real(tmp_path, f"WORLD, CLIP = {world}, {clip}\nimport trainstream.optim\n{RANKS}", None)


def test_a_group_of_one_rank_a_closure_and_an_optimizer_of_ours_change_no_bit(tmp_path):
    """Averages over one rank are copies there and back; what an optimizer had it keeps."""
    script = (
        STACK
        + """
import tempfile
import torch.distributed as dist
path = tempfile.mktemp()
dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
results = []
for distributed in ("auto", True):
    model, _ = make()
    optimizer = trainstream.optim.AdamW(model.parameters(), lr=1e-3, max_grad_norm=0.1)
    keys = {"vram": "160MiB", "param_offload": [1, 4], "distributed": distributed}
    trainstream.wrap(model, optimizer, "sim", **keys)
    on = [e.why for e in trainstream.session(model).events if e.what == "distributed"]
    assert on[0].startswith("off" if distributed == "auto" else "gradients are averaged in host")
    losses = []
    for step in range(5):
        def closure():
            optimizer.zero_grad()
            x, y = batch(step)
            loss = (model(x) - y).square().mean()
            loss.backward()
            return loss
        losses.append(optimizer.step(closure).item() if step % 2 else
                      train_step(model, optimizer, step))
        assert optimizer.grad_norm > 0
    trainstream.unwrap(model)
    assert type(optimizer) is trainstream.optim.AdamW  # As it came.
    results.append((losses, weights(model)))
assert results[0][0] == results[1][0]
assert all(a.equal(b) for a, b in zip(results[0][1], results[1][1]))

model, optimizer = make()
trainstream.wrap(model, optimizer, "sim", offload=True, distributed=True)
scaler = torch.amp.GradScaler("cpu")
scaler.scale(model(batch(0)[0]).square().mean()).backward()
try:
    scaler.step(optimizer)
except RuntimeError as error:
    print("GradScaler cannot be used" in str(error))
trainstream.unwrap(model)
print(hasattr(optimizer, "_step_supports_amp_scaling"))
"""
    )
    script = "import trainstream.optim\n" + script
    assert run_real(tmp_path, script, None).stdout == "True\nFalse\n"


@pytest.mark.parametrize("device", DEVICES)
def test_a_group_of_one_rank_averages_where_its_backend_can(tmp_path, device):
    """Over NCCL on a GPU, with paged blocks of two segments of torch's; the bits stay."""
    script = (
        STACK
        + """
import tempfile
import torch.distributed as dist
path = tempfile.mktemp()
n, vram, backend, where = {
    "cpu": (512, "160MiB", "gloo", "gradients are averaged in host"),
    "cuda": (4096, "2GiB", "nccl", "gradients are averaged on"),
}[DEVICE]
dist.init_process_group(backend, init_method=f"file://{path}", rank=0, world_size=1)
results = []
for distributed in ("auto", True):
    torch.manual_seed(7)
    model = Stack(6, n)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keys = {"vram": vram, "param_offload": [1, 4], "distributed": distributed}
    device = "cuda" if DEVICE == "cuda" else "sim"
    trainstream.wrap(model, optimizer, device, offload=True, max_grad_norm=0.1, **keys)
    session = trainstream.session(model)
    on = [e.why for e in session.events if e.what == "distributed"]
    assert on[0].startswith("off" if distributed == "auto" else where), on
    before = trainstream.memory_stats()["evicted_bytes"]
    losses = []
    for step in range(5):
        x, y = (part.to(DEVICE) for part in batch(step, n=n))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert session.pager.paged == [1, 4]
    moved = trainstream.memory_stats()["evicted_bytes"] - before
    trainstream.unwrap(model)
    results.append((losses, weights(model)))
    print(moved > 0)
assert results[0][0] == results[1][0] and len(set(results[0][0])) == 5
assert all(a.equal(b) for a, b in zip(results[0][1], results[1][1]))
dist.destroy_process_group()
"""
    )
    assert run_real(tmp_path, script, None, device=device).stdout == "True\nTrue\n"


def test_unwrap_leaves_plain_torch_with_all_that_was_learned(tmp_path):
    """A scheduler made before wrap() goes on, and training after unwrap() goes on as stock's."""
    script = (
        STACK
        + """
def run(wrapped):
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 8)
    losses = []
    for step in range(8):
        if wrapped and step == 2:
            keys = {"vram": "160MiB", "offload": True, "param_offload": 0.5}
            trainstream.wrap(model, optimizer, "sim", **keys)
            assert optimizer.state[model.head.weight]["step"].item() == 2
            assert type(optimizer) is trainstream.optim.AdamW
        if wrapped and step == 5:
            assert trainstream.unwrap(model) is model
        losses.append(train_step(model, optimizer, step))
        scheduler.step()
    return model, optimizer, losses

import warnings
warnings.simplefilter("error")
stock, stock_optimizer, losses = run(False)
model, optimizer, ours = run(True)
assert max(abs(a - b) for a, b in zip(losses, ours)) < 1e-5
assert max((a - b).abs().max() for a, b in zip(weights(stock), weights(model))) < 2e-4
assert type(optimizer) is torch.optim.AdamW
assert set(vars(optimizer)) == set(vars(stock_optimizer))
for key in ("lr", "fused", "foreach", "betas"):
    assert optimizer.param_groups[0][key] == stock_optimizer.param_groups[0][key]
hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
assert not any(getattr(m, name) for m in model.modules() for name in hooks)
assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
assert not any(map(is_cold, model.parameters()))
for p in model.parameters():
    state, other = optimizer.state[p], stock_optimizer.state[p] if p in stock_optimizer.state else 0
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and state["step"].item() == 8
fresh = torch.optim.AdamW(stock.parameters())
fresh.load_state_dict(optimizer.state_dict())
for call in (trainstream.unwrap, trainstream.session):
    try:
        call(model)
        raise AssertionError
    except trainstream.TrainstreamError as error:
        assert "not wrapped" in str(error)
"""
    )
    run_real(tmp_path, "import trainstream.optim\n" + script, None)


def test_auto_offload_settles_after_two_measured_steps_by_what_fits(tmp_path):
    """25 MB of weights: stock needs 100 MB and what a step makes, the host's 50."""
    script = (
        STACK
        + """
model, optimizer = make()
trainstream.wrap(model, optimizer, "sim", vram=VRAM)
session = trainstream.session(model)
kinds = []
for step in range(4):
    train_step(model, optimizer, step)
    kinds.append(type(optimizer).__module__.split(".")[0])
print(kinds)
print(*session.events, sep="\\n", file=sys.stderr)
assert len(optimizer.state[model.head.weight]) == 3
assert [e.what for e in session.events].count("optimizer") >= 2
optimizer.load_state_dict(optimizer.state_dict())
train_step(model, optimizer, 7)
"""
    )
    stock, host = "torch", "trainstream"
    cases = [
        ("512MiB", [stock] * 4),
        ("128MiB", [host] * 2 + [stock] * 2),
        ("72MiB", [host] * 4),
    ]
    for vram, kinds in cases:
        text = f"VRAM = {vram!r}\nimport trainstream.optim\n{script}"
        assert run_real(tmp_path, text, None).stdout == f"{kinds}\n", vram
