"""Plain torch: convolutions, complex and sparse tensors, loaders, profilers, many lengths."""

import pytest
from matrix import LONG, ecosystem, run_cell
from real_runner import DEVICES

pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]

# Blocks as torchvision's ResNets have them.
RESNET = """
from torch import nn
import torch.nn.functional as F

class Block(nn.Module):
    def __init__(self, n, out, stride):
        super().__init__()
        self.first = nn.Conv2d(n, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.relu = nn.ReLU(inplace=True)
        self.down = None if stride == 1 and n == out else nn.Sequential(
            nn.Conv2d(n, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        same = x if self.down is None else self.down(x)
        x = self.relu(self.norms[0](self.first(x)))
        x = self.norms[1](self.second(x))
        x += same
        return self.relu(x)

torch.manual_seed(4)
N = WIDTH // 4
pool = nn.MaxPool2d(2) if DEVICE == "cpu" else nn.AvgPool2d(2)  # Max is not deterministic there.
model = nn.Sequential(
    nn.Conv2d(3, N, 3, 1, 1, bias=False), nn.BatchNorm2d(N), nn.ReLU(inplace=True), Block(N, N, 1),
    Block(N, 2 * N, 2), Block(2 * N, 2 * N, 1), pool, Block(2 * N, 4 * N, 1),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * N, 10)).to(DEVICE)

def images(step, count=6):
    g = torch.Generator().manual_seed(step)
    return (torch.randn(count, 3, 16, 16, generator=g).to(DEVICE),
            torch.randint(0, 10, (count,), generator=g).to(DEVICE))
"""


@pytest.mark.parametrize("layout", ["contiguous_format", "channels_last"])
def test_residual_network_with_batch_norm(tmp_path, device, layout):
    script = f"""
layout = torch.{layout}
model = model.to(memory_format=layout)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
for step in range(40 if LONG else 8):
    x, y = images(step)
    loss = F.cross_entropy(model(x.to(memory_format=layout)), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(loss.item())
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            show(model(images(100 + step)[0].to(memory_format=layout)))
        model.train()
show(model, optimizer)
show(all(p.is_contiguous(memory_format=layout) for p in model.parameters() if p.dim() == 4))
"""
    shown = run_cell(tmp_path, RESNET + script, device=device)
    assert shown.lines[-1] == "= True"


def test_averaged_weights_and_recomputed_statistics(tmp_path, device):
    script = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
for step in range(40 if LONG else 6):
    x, y = images(step)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
    show(loss.item())
update_bn([images(step) for step in range(4)], average, device=DEVICE)
show(model, average, optimizer)
"""
    run_cell(tmp_path, RESNET + script, device=device)


def test_complex_weights_and_transforms(tmp_path, device):
    """A layer in frequency space (as Fourier neural operators have it), complex matrices."""
    script = """
from torch import nn
torch.manual_seed(2)

class Spectral(nn.Module):
    def __init__(self, n, modes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n, modes, dtype=torch.complex64) / n)
        self.mix = nn.Parameter(torch.randn(n, n, dtype=torch.complex64) / n)
        self.modes = modes

    def forward(self, x):
        f = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", f[..., : self.modes], self.weight)
        kept = kept.transpose(1, 2) @ self.mix
        f = torch.cat([kept.transpose(1, 2), f[..., self.modes :].conj()], -1)
        return torch.fft.irfft(f, n=x.shape[-1]).tanh()

n = WIDTH // 2
model = nn.Sequential(*[Spectral(n, 12) for _ in range(3)]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40 if LONG else 8):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(8, n, 64, generator=g).to(DEVICE)
    loss = (model(x) - x.roll(3, -1)).square().mean()
    loss = loss + 1e-3 * torch.view_as_real(model[0].weight).square().sum().sqrt()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    show(loss.item(), norm.item())
    optimizer.step()
    optimizer.zero_grad()
show(model, optimizer)
"""
    run_cell(tmp_path, script, device=device)


def test_sparse_gradients_of_embeddings(tmp_path, device):
    script = """
from torch import nn
torch.manual_seed(2)
words = nn.Embedding(4000, WIDTH, sparse=True).to(DEVICE)
bags = nn.EmbeddingBag(2000, WIDTH, sparse=True, mode="sum").to(DEVICE)
head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 4000)).to(DEVICE)
sparse = torch.optim.SparseAdam([*words.parameters(), *bags.parameters()], lr=1e-2)
dense = torch.optim.AdamW(head.parameters(), lr=1e-3)
for step in range(40 if LONG else 8):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 4000, (64,), generator=g).to(DEVICE)
    bag = torch.randint(0, 2000, (64, 5), generator=g).to(DEVICE)
    out = head(torch.cat([words(ids), bags(bag)], -1))
    loss = nn.functional.cross_entropy(out, ids.roll(1))
    loss.backward()
    assert words.weight.grad.is_sparse
    for optimizer in (sparse, dense):
        optimizer.step()
        optimizer.zero_grad()
    show(loss.item())
show(words, bags, head, sparse, dense)
"""
    run_cell(tmp_path, script, device=device, share=0.5)


LOADED = """
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(1)

class Rows(Dataset):
    def __init__(self):
        self.x = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(7))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.x[(i + 1) % len(self.x)]

def main():
    model = nn.Sequential(
        *[m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Rows(), 12, shuffle=True, num_workers=2, multiprocessing_context=METHOD,
        persistent_workers=True, pin_memory=DEVICE == "cuda",
        generator=torch.Generator().manual_seed(3))
    for epoch in range(6 if LONG else 2):
        for x, y in loader:
            loss = (model(x.to(DEVICE)) - y.to(DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            show(loss.item())
    show(model, optimizer)

if __name__ == "__main__":
    main()
"""


spawns = pytest.mark.skipif(
    not LONG, reason="starts many Pythons: of the long form; tests/test_promise.py has a short one"
)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=spawns)])
def test_loader_workers_feed_a_model(tmp_path, device, method):
    run_cell(
        tmp_path,
        f"METHOD = {method!r}\n{LOADED}",
        device=device,
        share=0.35,
        fresh=method == "spawn" or device == "cuda",
        processes=3 if method == "spawn" else 1,
    )


@spawns
def test_tensors_are_shared_with_processes_that_train(tmp_path, device):
    """Hogwild, one process at a time so that the bits are certain: each trains shared weights."""
    script = """
import torch.multiprocessing as mp
from torch import nn

def train(model, seed):
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    device = next(model.parameters()).device
    for step in range(4):
        g = torch.Generator().manual_seed(seed + step)
        x = torch.randn(16, WIDTH, generator=g).to(device)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.synchronize()

if __name__ == "__main__":
    torch.manual_seed(1)
    wide = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    model = nn.Sequential(*wide).to(DEVICE)
    own = [torch.randn(WIDTH, 4 * WIDTH).to(DEVICE) for _ in range(12)]
    model.share_memory()
    context = mp.get_context("spawn")
    for round in range(2):
        process = context.Process(target=train, args=(model, 10 * round))
        process.start()
        process.join()
        show(process.exitcode, model)
        train(model, 100 * round)
        own = [w @ w.t() @ w for w in own]
        own = [w / w.norm() for w in own]
        show(model, own)
"""
    run_cell(tmp_path, script, device=device, fresh=True, processes=3)


def test_profiler_on_at_the_same_time(tmp_path, device):
    script = """
from torch.profiler import profile, record_function, schedule
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
seen = []
with profile(schedule=schedule(wait=1, warmup=1, active=2, repeat=1), record_shapes=True,
             profile_memory=True, with_stack=True,
             on_trace_ready=lambda p: seen.append(p.key_averages())) as trace:
    for step in range(5):
        x, y = images(step)
        with record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss.item())
        trace.step()
names = [{event.key for event in events} for events in seen]
show(len(seen), all({"forward", "aten::convolution_backward"} <= n for n in names))
show(model, optimizer)
"""
    shown = run_cell(tmp_path, RESNET + script, device=device)
    assert "= 1 True" in shown.lines


def test_many_steps_of_random_lengths_take_no_more_memory(tmp_path, device):
    """After the longest batch was seen: process, page-locked and reserved memory stay."""
    script = """
import random
from torch import nn
torch.manual_seed(2)
random.seed(2)
block = lambda: nn.TransformerEncoderLayer(
    WIDTH, 4, 2 * WIDTH, dropout=0, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(256, WIDTH), *[block() for _ in range(2)], nn.Linear(WIDTH, 256)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

def memory():
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    now = stats()
    reserved = torch.cuda.memory_reserved() if DEVICE == "cuda" else now.get("resident_bytes", 0)
    return resident, now.get("page_locked_bytes", 0), reserved

STEPS = 500 if LONG else 80
lengths = [96, *(random.randint(1, 96) for _ in range(STEPS - 1))]
lengths[9:12] = [96, 96, 96]
for step, length in enumerate(lengths):
    g = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (4, length + 1), generator=g).to(DEVICE)
    logits = model(ids[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        show(loss.item())
    if step == STEPS // 4:
        before = memory()
after = memory()
names = "the process", "page-locked memory", "reserved memory"
grown = [f"{name} grew from {a} to {b} bytes" for name, a, b in zip(names, before, after) if b > a]
assert after[0] <= before[0] + (16 << 20), grown
assert after[1] <= before[1], grown
if DEVICE == "cuda" and _C is not None:
    assert after[2] <= before[2], grown
show(model, optimizer)
"""
    run_cell(tmp_path, script, device=device, share=0.5)
