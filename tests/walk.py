"""A seeded random walk over real tensors under a small budget, each compared with a NumPy twin.

    python tests/walk.py --operations 2000 --seed 7 --device sim|cuda [--threads 2] [--faults]

Values are small whole numbers in float32, so that sums and products are exact and one order of
additions is as good as another. Every comparison is bit for bit; at the end all is freed and every
counter of bytes must be back at zero. The seed is printed first; exit status 1 on a difference.
"""

import argparse
import ctypes
import gc
import os
import random
import sys
import threading

BUDGET = "48MiB"
SIDES = (512, 640, 1024)  # 1 MiB, 1.6 MiB and 4 MiB in float32: all managed.
LARGEST = 2.0**20  # Beyond it values are folded back, so that matmul stays below 2**24.


def switch_on(device, seed):
    os.environ["PYTORCH_TRAINSTREAM"] = "1"
    os.environ["PYTORCH_TRAINSTREAM_CONF"] = f"vram:{BUDGET},device:{device}"
    print(f"walk: seed {seed}, device {device}, budget {BUDGET}", flush=True)


class Pair:
    """A tensor and the NumPy array that must always equal it."""

    def __init__(self, tensor, twin):
        self.tensor, self.twin = tensor, twin


class Walk:
    """One thread's walk: its own pairs, and operations on them in random order."""

    def __init__(self, seed, device, shared):
        self.random = random.Random(seed)
        self.device = "cuda" if device == "cuda" else "cpu"
        self.pairs, self.shared, self.compared = [], shared, 0

    def run(self, operations):
        steps = [self.make] * 5 + [self.free] * 4 + [self.add, self.multiply, self.copy] * 3
        steps += [self.view, self.write_slice, self.transposed, self.matmul, self.compare] * 3
        steps += [self.resize, self.set, self.swap_data, self.write_raw, self.evict, self.stack]
        steps += [self.read_shared, self.clone, self.cast, self.index]
        for _ in range(operations):
            if len(self.pairs) > 24:
                self.free()
            step = self.random.choice(steps)
            step()
        while self.pairs:
            self.check(self.pairs.pop())

    def pick(self, side=None):
        found = [p for p in self.pairs if side is None or p.tensor.shape == (side, side)]
        return self.random.choice(found) if found else self.make(side)

    def make(self, side=None):
        side = side or self.random.choice(SIDES)
        modulus, offset = self.random.randrange(2, 97), self.random.randrange(50)
        twin = ((numpy.arange(side * side) + offset) % modulus).astype(numpy.float32)
        twin = twin.reshape(side, side)
        numbers = torch.arange(side * side, device=self.device)
        tensor = numbers.add_(offset).remainder_(modulus).to(torch.float32).view(side, side)
        self.pairs.append(Pair(tensor, twin))
        return self.pairs[-1]

    def free(self):
        if self.pairs:
            self.check(self.pairs.pop(self.random.randrange(len(self.pairs))))

    def check(self, pair):
        self.compared += 1
        got = pair.tensor.detach().cpu().numpy()
        if got.shape != pair.twin.shape or not numpy.array_equal(got, pair.twin):
            raise SystemExit(f"walk: tensor {tuple(got.shape)} differs from its twin")

    def fold(self, pair):
        if numpy.abs(pair.twin).max() > LARGEST:
            pair.tensor.fmod_(7.0)
            numpy.fmod(pair.twin, numpy.float32(7), out=pair.twin)

    def add(self):
        a = self.pick()
        b = self.pick(a.tensor.shape[0]) if a.tensor.shape[0] == a.tensor.shape[-1] else a
        if b.tensor.shape == a.tensor.shape:
            other = b.twin.copy()
            a.tensor.add_(b.tensor.clone() if b is a else b.tensor)
            a.twin += other
            self.fold(a)

    def multiply(self):
        pair, by = self.pick(), self.random.choice((-1.0, 2.0, 1.0))
        pair.tensor.mul_(by)
        pair.twin *= numpy.float32(by)
        self.fold(pair)

    def copy(self):
        a = self.pick()
        b = self.pick()
        if a.tensor.shape == b.tensor.shape:
            a.tensor.copy_(b.tensor.clone())
            a.twin[...] = b.twin.copy()

    def clone(self):
        pair = self.pick()
        self.pairs.append(Pair(pair.tensor.clone(), pair.twin.copy()))

    def cast(self):
        pair = self.pick()
        tensor = pair.tensor.to(torch.float64).to(torch.float32)
        self.pairs.append(Pair(tensor, pair.twin.copy()))

    def view(self):
        pair = self.pick()
        rows = self.random.randrange(1, pair.tensor.shape[0] + 1)
        self.pairs.append(Pair(pair.tensor[:rows], pair.twin[:rows]))

    def write_slice(self):
        pair, value = self.pick(), float(self.random.randrange(9))
        row = self.random.randrange(pair.tensor.shape[0])
        pair.tensor[row, ::3] = value
        pair.twin[row, ::3] = value

    def transposed(self):
        pair = self.pick()
        pair.tensor.t().add_(1.0)
        pair.twin.T[...] += numpy.float32(1)
        self.fold(pair)

    def matmul(self):
        side = self.random.choice(SIDES)
        a, b = self.pick(side), self.pick(side)
        left, right = a.tensor.fmod(3.0), b.tensor.fmod(3.0)
        product = numpy.fmod(a.twin, numpy.float32(3)) @ numpy.fmod(b.twin, numpy.float32(3))
        self.pairs.append(Pair(left @ right, product))
        self.fold(self.pairs[-1])

    def stack(self):
        pair = self.pick()
        self.pairs.append(
            Pair(torch.cat([pair.tensor, pair.tensor]), numpy.tile(pair.twin, (2, 1)))
        )

    def index(self):
        pair = self.pick()
        rows = [self.random.randrange(pair.tensor.shape[0]) for _ in range(300)]
        where = torch.tensor(rows, device=self.device)
        self.pairs.append(Pair(pair.tensor.index_select(0, where), pair.twin[rows]))

    def compare(self):
        self.check(self.pick())

    def resize(self):
        pair = self.clone_of_its_own()
        rows = self.random.randrange(1, pair.tensor.shape[0] + 1)
        pair.tensor.resize_(rows, pair.tensor.shape[1])
        pair.twin = pair.twin[:rows].copy()

    def clone_of_its_own(self):
        self.clone()
        return self.pairs[-1]

    def set(self):
        pair = self.pick()
        window = torch.empty(0, device=self.device)
        window.set_(pair.tensor)
        self.pairs.append(Pair(window, pair.twin))

    def swap_data(self):
        a, b = self.pick(), self.pick()
        a.tensor.data, b.tensor.data = b.tensor.data, a.tensor.data
        a.twin, b.twin = b.twin, a.twin

    def write_raw(self):
        pair = self.clone_of_its_own()
        value = float(self.random.randrange(9))
        if self.device == "cpu":
            address = pair.tensor.data_ptr()
            (ctypes.c_float * 8).from_address(address)[:] = [value] * 8
        else:
            torch.from_dlpack(pair.tensor).view(-1)[:8] = value
        pair.twin.reshape(-1)[:8] = value

    def evict(self):
        extension.evict_all()

    def read_shared(self):
        pair = self.random.choice(self.shared)
        total = pair.tensor.sum(dtype=torch.float64).item()
        if total != float(pair.twin.sum(dtype=numpy.float64)):
            raise SystemExit("walk: a shared tensor differs from its twin")


def walk(options):
    """Returns the number of comparisons. Raises SystemExit on a difference."""
    shared_maker = Walk(options.seed, options.device, [])
    shared = [shared_maker.make() for _ in range(4)]
    walks = [Walk(options.seed + i, options.device, shared) for i in range(options.threads)]
    share = options.operations // options.threads
    failures = []

    def run(one):
        try:
            one.run(share)
        except BaseException as failure:  # A thread's SystemExit would be lost.
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(one,)) for one in walks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(one.compared for one in walks)


def check_baseline():
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # They are storages of ours too.
    stats = extension.stats()
    left = {key: stats[key] for key in ("resident_bytes", "cold_bytes", "host_in_use_bytes")}
    if any(left.values()):
        raise SystemExit(f"walk: bytes did not return to the baseline: {left}")
    return stats


def parse_command_line():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--device", choices=("sim", "cuda"), default="sim")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--faults", action="store_true", help="one copy in seven is refused (sim)")
    return parser.parse_args()


def main(options):
    if options.faults:
        extension.sim_faults(7, 2**63)
    compared = walk(options)
    stats = check_baseline()
    moved = {key: stats[key] >> 20 for key in ("evicted_bytes", "restored_bytes", "in_place_bytes")}
    print(
        f"walk: {options.operations} operations, {compared} comparisons, no difference; "
        f"MiB {moved}, moves refused {stats['failures']}"
    )
    return 0


if __name__ == "__main__":
    choices = parse_command_line()
    switch_on(choices.device, choices.seed)
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    from trainstream import _C as extension

    sys.exit(main(choices))
