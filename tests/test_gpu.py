"""What only a GPU can show beyond the cases and the operators: marker `gpu`."""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def needs_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")


def run(script, conf="vram:64MiB,device:cuda", on=True):
    environment = {k: v for k, v in os.environ.items() if "TRAINSTREAM" not in k}
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment["PYTHONPATH"] = path
    if on:
        environment.update(PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF=conf)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


STATISTICS = """
import torch
w = [torch.full((1 << 20,), float(i), device="cuda") for i in range(40)]
stats = torch.cuda.memory_stats()
assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() <= 64 << 20
assert torch.cuda.max_memory_reserved() <= 64 << 20
assert stats["num_ooms"] == 0, stats["num_ooms"]
assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
assert "Allocated memory" in torch.cuda.memory_summary()
torch.cuda.memory._record_memory_history()
x = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory._snapshot()["segments"]
torch.cuda.memory._record_memory_history(enabled=None)
torch.cuda.empty_cache()
assert torch.cuda.get_per_process_memory_fraction() == 1.0
torch.cuda.set_per_process_memory_fraction(0.5)
assert torch.cuda.get_per_process_memory_fraction() == 0.5
torch.cuda.set_per_process_memory_fraction(1.0)
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    y = torch.ones(1 << 20, device="cuda")
torch.backends.cudnn.benchmark = True
image = torch.randn(4, 8, 64, 64, device="cuda")
torch.nn.functional.conv2d(image, torch.randn(8, 8, 3, 3, device="cuda"))
assert all(bool((t == float(i)).all()) for i, t in enumerate(w)) and bool((y == 1).all())
print("fine")
"""


def test_functions_of_torch_cuda_memory_work_and_stay_right_under_pressure():
    assert "fine" in run(STATISTICS)


MANY_SMALL = """
import torch
large = [torch.full((1 << 20,), float(i), device="cuda") for i in range(20)]
small = [torch.full((64 << 10,), float(i), device="cuda") for i in range(400)]  # 100 MiB in all
tiny = [torch.full((256,), float(i), device="cuda") for i in range(500)]
before = None
for step in range(4):
    for tensor in (*small, *tiny):
        tensor.add_(1.0)
    fresh = [torch.full((64 << 10,), float(step), device="cuda") for _ in range(50)]
    for tensor in fresh:
        assert bool((tensor == float(step)).all())
    del fresh
    stats = torch.cuda.memory_stats()
    driver = stats["num_device_alloc"], stats["num_device_free"]
    assert step < 2 or driver == before, (driver, before)
    before = driver
assert stats["num_ooms"] == 0, stats["num_ooms"]
assert torch.cuda.max_memory_reserved() <= 64 << 20, torch.cuda.max_memory_reserved()
assert all(bool((t == i + 4.0).all()) for i, t in enumerate(small))
assert all(bool((t == i + 4.0).all()) for i, t in enumerate(tiny))
assert all(bool((t == float(i)).all()) for i, t in enumerate(large))
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    total = small[-1].sum()
small[-1].record_stream(side)
del small[-1], tensor
torch.cuda.current_stream().wait_stream(side)
assert total.item() == (64 << 10) * 403.0
print("fine")
"""


def test_many_blocks_too_small_to_manage_stay_within_the_budget_all_the_same():
    """As the adapters of a large model and their moments are: each is below min_storage."""
    assert "fine" in run(MANY_SMALL)


CHANGED = """
import torch, trainstream
torch.cuda.memory.change_current_allocator(trainstream.allocator(vram="64MiB"))
w = [torch.full((1 << 20,), float(i), device="cuda") for i in range(40)]
assert all(bool((t == float(i)).all()) for i, t in enumerate(w))
assert trainstream.memory_stats()["evicted_bytes"] > 0
print("fine")
"""


def test_change_current_allocator_works_by_itself():
    assert "fine" in run(CHANGED, on=False)


LATE = """
import torch, trainstream
before = torch.ones(1 << 20, device="cuda")
trainstream.enable(vram="64MiB", device="cuda")
w = [torch.full((1 << 20,), float(i), device="cuda") for i in range(40)]
assert all(bool((t == float(i)).all()) for i, t in enumerate(w)) and bool((before == 1).all())
assert trainstream.memory_stats()["evicted_bytes"] > 0
del before
print("fine")
"""


def test_enable_works_after_cuda_has_started():
    assert "fine" in run(LATE, on=False)


FORKED = """
import os, torch
pid = os.fork()
if pid == 0:
    assert torch.ones(4, device="cuda").sum().item() == 4.0
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
print("fine")
"""


def test_child_may_be_the_first_to_use_cuda():
    assert "fine" in run(FORKED)


EXHAUSTED = """
import torch
held = []
try:
    for _ in range(200):
        held.append(torch.ones(4 << 20, device="cuda"))
except torch.OutOfMemoryError as error:
    text = str(error)
    for word in ("cannot place", "budget 64.00 MiB", "pinned", "memory limit 1.00 GiB", "ram"):
        assert word in text, text
    assert len(held) < 70 and torch.cuda.max_memory_reserved() <= 64 << 20
    held.clear()
    assert torch.ones(4 << 20, device="cuda").sum().item() == 4 << 20
    print("fine")
"""


def test_exhausted_memory_is_one_error_with_every_number_and_the_process_goes_on():
    assert "fine" in run(EXHAUSTED, conf="vram:64MiB,ram:1GiB,device:cuda")
