"""A seeded random walk over real tensors under a small budget, each compared with a NumPy twin.

    python tests/walk.py --operations 2000 --seed 7 --device sim|cuda [--threads 2] [--faults]
                         [--storm] [--ram 40MiB] [--small] [--verify]

Values are small whole numbers in float32, so that sums and products are exact and one order of
additions is as good as another. Every comparison is bit for bit; at the end all is freed and every
counter of bytes must be back at zero. The seed is printed first; exit status 1 on a difference.
"""

import argparse
import copy
import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading

import numpy
import torch

import trainstream

LARGEST = 2.0**20  # Beyond it values are folded back, so that matmul stays below 2**24.
PAIRS_MAX = 24
GRAPHS_MAX = 4
ALIASES_MAX = 3  # Their storages stay on the device for good.


class Scale:
    """Large: 1 MiB, 1.6 MiB and 4 MiB, all managed by default. Small: 6 KiB to 36 KiB, for ten
    times as many operations (simulation only).
    """

    def __init__(self, small):
        self.sides = (40, 64, 96) if small else (512, 640, 1024)
        self.budget = "400KiB" if small else "48MiB"
        self.min_storage = 2**12 if small else 2**20


class Pair:
    """A tensor and the NumPy array that must always equal it.

    `alias`, where there is one, is the same memory by an address that torch gave away.
    """

    def __init__(self, tensor, twin, alias=None):
        self.tensor, self.twin, self.alias = tensor, twin, alias


class Walk:
    """One thread's walk: its own pairs, and operations on them in random order.

    Args:
        seed: Of this walk.
        device: "sim" or "cuda".
        shared: Pairs that every thread reads and none writes.
        mine: A part, this thread's alone, of a storage of which other threads write the rest.
    """

    def __init__(self, seed, scale, device, shared=(), mine=None):
        self.random, self.scale = random.Random(seed), scale
        self.device = "cuda" if device == "cuda" else "cpu"
        self.pairs, self.shared, self.mine = [], shared, mine
        self.graphs = []
        self.compared = self.exhausted = 0

    def run(self, operations, forks=False, faults=False, lazy=True):
        steps = [self.make] * 5 + [self.free] * 4 + [self.add, self.multiply, self.copy] * 3
        steps += [self.view, self.write_slice, self.transposed, self.matmul, self.compare] * 3
        steps += [self.resize, self.set, self.swap_data, self.write_raw, self.evict, self.stack] * 2
        steps += [self.read_shared, self.clone, self.cast, self.index, self.refill, self.foreach]
        steps += [self.differentiate, self.deepcopy, self.keep_alias]
        steps += [self.save, self.recall] * 2
        steps += [self.write_alias, self.write_mine, self.write_mine_in_place, self.multiply_mine]
        steps += [self.lazy_clone] * lazy
        for _ in range(operations):
            if len(self.pairs) > PAIRS_MAX:
                self.free()
            try:
                self.random.choice(steps)()
            except torch.OutOfMemoryError:
                self.make_room()
            if forks and self.random.random() < 0.01:
                self.fork()
            if faults and self.random.random() < 0.01:
                extension.sim_faults(self.random.choice((0, 1, 2, 7)), 2**63)
        self.graphs.clear()
        while self.pairs:
            self.check(self.pairs.pop())
        self.check(self.mine)

    def make_room(self):
        """An operation that allocates does so before it changes anything, so twins stay right."""
        self.exhausted += 1
        self.graphs.clear()
        self.random.shuffle(self.pairs)
        del self.pairs[len(self.pairs) // 2 :]

    def pick(self, side=None):
        found = [p for p in self.pairs if side is None or p.tensor.shape == (side, side)]
        return self.random.choice(found) if found else self.make(side)

    def keep(self, tensor, twin, alias=None):
        self.pairs.append(Pair(tensor, twin, alias))
        return self.pairs[-1]

    def make(self, side=None):
        side = side or self.random.choice(self.scale.sides)
        modulus, offset = self.random.randrange(2, 97), self.random.randrange(50)
        twin = ((numpy.arange(side * side) + offset) % modulus).astype(numpy.float32)
        numbers = torch.arange(side * side, device=self.device)
        tensor = numbers.add_(offset).remainder_(modulus).to(torch.float32).view(side, side)
        return self.keep(tensor, twin.reshape(side, side))

    def free(self):
        if self.pairs:
            self.check(self.pairs.pop(self.random.randrange(len(self.pairs))))

    def check(self, pair):
        """By parts that are not managed themselves: there may be no room."""
        self.compared += 1
        tensor, twin = pair.tensor.detach(), pair.twin
        rows = (self.scale.min_storage - 1) // (4 * tensor.shape[1])
        same = tensor.shape == twin.shape
        for i in range(0, len(twin), rows):
            part = torch.empty_like(tensor[i : i + rows], memory_format=torch.contiguous_format)
            got = part.copy_(tensor[i : i + rows]).cpu().numpy()
            same = same and got.tobytes() == twin[i : i + rows].tobytes()
        if not same:
            raise SystemExit(f"walk: tensor {tuple(tensor.shape)} differs from its twin")
        if pair.alias is not None and not torch.equal(pair.alias, tensor):
            raise SystemExit(f"walk: an alias of tensor {tuple(tensor.shape)} differs from it")

    def fold(self, pair):
        if numpy.abs(pair.twin).max() > LARGEST:
            pair.tensor.fmod_(7.0)
            numpy.fmod(pair.twin, numpy.float32(7), out=pair.twin)
        pair.tensor.add_(0.0)  # No negative zero: its bits depend on the order of operations.
        pair.twin += numpy.float32(0)

    # --- Writes in place ---

    def add(self):
        a = self.pick()
        b = self.pick(a.tensor.shape[0]) if a.tensor.shape[0] == a.tensor.shape[-1] else a
        if b.tensor.shape == a.tensor.shape:
            addend = b.tensor.clone()
            a.tensor.add_(addend)
            a.twin += b.twin.copy()
            self.fold(a)

    def multiply(self):
        pair, by = self.pick(), self.random.choice((-1.0, 2.0, 1.0))
        pair.tensor.mul_(by)
        pair.twin *= numpy.float32(by)
        self.fold(pair)

    def copy(self):
        a, b = self.pick(), self.pick()
        if a.tensor.shape == b.tensor.shape:
            a.tensor.copy_(b.tensor.clone())
            a.twin[...] = b.twin.copy()

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

    def foreach(self):
        pairs = [self.clone_of_its_own() for _ in range(self.random.randrange(2, 6))]
        torch._foreach_add_([p.tensor for p in pairs], 3.0)
        torch._foreach_mul_([p.tensor for p in pairs], 2.0)
        for pair in pairs:
            pair.twin += numpy.float32(3)
            pair.twin *= numpy.float32(2)
            self.fold(pair)

    def write_mine(self):
        addend = self.make(self.scale.sides[0])
        self.mine.tensor.add_(addend.tensor)
        self.mine.twin += addend.twin
        self.fold(self.mine)

    def write_mine_in_place(self):
        """By an operator that leaves cold bytes where they are."""
        rows = self.random.sample(range(self.scale.sides[0]), 9)
        source = torch.ones(9, self.scale.sides[0], device=self.device)
        self.mine.tensor.index_add_(0, torch.tensor(rows, device=self.device), source)
        self.mine.twin[rows] += numpy.float32(1)

    # --- New tensors ---

    def clone(self):
        pair = self.pick()
        return self.keep(pair.tensor.clone(), pair.twin.copy())

    def clone_of_its_own(self):
        return self.clone()

    def deepcopy(self):
        pair = self.pick()
        self.keep(copy.deepcopy(pair.tensor), pair.twin.copy())

    def cast(self):
        pair = self.pick()
        tensor = pair.tensor.to(torch.float64).to(torch.float32)
        self.keep(tensor, pair.twin.copy())

    def view(self):
        pair = self.pick()
        rows = self.random.randrange(pair.tensor.shape[0]) + 1
        self.keep(pair.tensor[:rows], pair.twin[:rows])

    def matmul(self):
        side = self.random.choice(self.scale.sides)
        a, b = self.pick(side), self.pick(side)
        left, right = a.tensor.fmod(3.0), b.tensor.fmod(3.0)
        product = numpy.fmod(a.twin, numpy.float32(3)) @ numpy.fmod(b.twin, numpy.float32(3))
        self.fold(self.keep(left @ right, product))

    def multiply_mine(self):
        """By an operator that wants its inputs on the device."""
        twin = numpy.fmod(self.mine.twin[:16], numpy.float32(3))
        other = numpy.fmod(self.shared[0].twin, numpy.float32(3))
        left, right = self.mine.tensor[:16].fmod(3.0), self.shared[0].tensor.fmod(3.0)
        self.fold(self.keep(left @ right, twin @ other))
        torch.mm(self.mine.tensor, self.shared[0].tensor)

    def stack(self):
        pair = self.pick()
        self.keep(torch.cat([pair.tensor, pair.tensor]), numpy.tile(pair.twin, (2, 1)))

    def index(self):
        pair = self.pick()
        rows = [self.random.randrange(pair.tensor.shape[0]) for _ in range(300)]
        where = torch.tensor(rows, device=self.device)
        self.keep(pair.tensor.index_select(0, where), pair.twin[rows])

    def lazy_clone(self):
        pair = self.clone_of_its_own()
        other = self.keep(torch._lazy_clone(pair.tensor), pair.twin.copy())
        for one in self.random.choice(((pair, other), (other, pair), (other,), ())):
            one.tensor.add_(1.0)
            one.twin += numpy.float32(1)

    def differentiate(self):
        pair = self.pick()
        leaf = pair.tensor.detach().fmod(9.0).requires_grad_()
        loss = (leaf * leaf).sum()
        if self.random.random() < 0.5:
            self.evict()
        loss.backward()
        twin = numpy.fmod(pair.twin, numpy.float32(9)) * numpy.float32(2)
        self.fold(self.keep(leaf.grad, twin))

    def save(self):
        """A graph whose saved tensors leave early, a view beside its whole; recalled later."""
        if len(self.graphs) == GRAPHS_MAX:
            self.graphs.pop(0)
        pair = self.pick()
        leaf = pair.tensor.detach().fmod(5.0).requires_grad_()
        twin = numpy.fmod(pair.twin, numpy.float32(5)) * numpy.float32(18)
        rows = len(twin) // 2
        with trainstream.spill_activations(share=self.random.choice((0.5, 1))):
            hidden = leaf * 3.0
            loss = (hidden * hidden).sum() + hidden[:rows].square().sum()
        twin[:rows] *= numpy.float32(2)
        self.graphs.append((leaf, loss, twin))

    def recall(self):
        if not self.graphs:
            return
        leaf, loss, twin = self.graphs.pop(self.random.randrange(len(self.graphs)))
        if self.random.random() < 0.3:
            loss.backward(retain_graph=True)
            twin *= numpy.float32(2)
        loss.backward()
        self.fold(self.keep(leaf.grad, twin))

    # --- Storages that change ---

    def resize(self):
        pair = self.clone_of_its_own()
        rows = self.random.randrange(pair.tensor.shape[0]) + 1
        pair.tensor.resize_(rows, pair.tensor.shape[1])
        pair.twin = pair.twin[:rows].copy()

    def refill(self):
        pair = self.clone_of_its_own()
        self.pairs.remove(pair)  # Without bytes while the storage is empty.
        storage, source = pair.tensor.untyped_storage(), pair.tensor.clone()
        size = storage.size()
        storage.resize_(0)
        self.make()
        storage.resize_(size)
        pair.tensor.copy_(source)
        self.pairs.append(pair)

    def set(self):
        pair = self.pick()
        window = torch.empty(0, device=self.device)
        window.set_(pair.tensor)
        self.keep(window, pair.twin)

    def swap_data(self):
        a, b = self.pick(), self.pick()
        a.tensor.data, b.tensor.data = b.tensor.data, a.tensor.data
        a.twin, b.twin = b.twin, a.twin
        a.alias, b.alias = b.alias, a.alias

    # --- Addresses ---

    def write_raw(self):
        pair = self.clone_of_its_own()
        value = float(self.random.randrange(9))
        if self.device == "cpu":
            address = pair.tensor.data_ptr()
            (ctypes.c_float * 8).from_address(address)[:] = [value] * 8
        else:
            torch.from_dlpack(pair.tensor).view(-1)[:8] = value
        pair.twin.reshape(-1)[:8] = value

    def keep_alias(self):
        if sum(pair.alias is not None for pair in self.pairs) < ALIASES_MAX:
            pair = self.clone_of_its_own()
            if self.device == "cpu" and self.random.random() < 0.5:
                pair.alias = torch.from_numpy(pair.tensor.numpy())
            else:
                pair.alias = torch.from_dlpack(pair.tensor)

    def write_alias(self):
        for pair in self.pairs:
            if pair.alias is not None:
                row = self.random.randrange(pair.tensor.shape[0])
                pair.alias[row] = 5.0
                pair.twin[row] = 5.0

    # --- All the rest ---

    def compare(self):
        self.check(self.random.choice((self.pick(), self.mine)))

    def evict(self):
        extension.evict_all()

    def read_shared(self):
        pair = self.random.choice(self.shared)
        total = pair.tensor.sum(dtype=torch.float64).item()
        if total != float(pair.twin.sum(dtype=numpy.float64)):
            raise SystemExit("walk: a shared tensor differs from its twin")

    def fork(self):
        """The child reads and writes what it inherits, and moves nothing."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for pair in self.pairs[:6]:
                    pair.tensor.add_(1.0)
                    pair.twin += numpy.float32(1)
                    pair.alias = None
                    pair.twin += numpy.float32(0)
                    pair.tensor.add_(0.0)
                for pair in self.pairs[6:9]:
                    self.check(pair)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit("walk: a forked child saw other bytes or failed")


def walk(options):
    """Returns the numbers of comparisons and of exhausted memory. SystemExit on a difference."""
    scale = Scale(options.small)
    side, walks = scale.sides[0], []
    maker = Walk(options.seed, scale, options.device)
    shared = [maker.make(side)] + [maker.make() for _ in range(3)]
    common = torch.zeros(options.threads * side, side, device=maker.device)
    for i in range(options.threads):
        part = Pair(common[i * side : (i + 1) * side], numpy.zeros((side, side), numpy.float32))
        walks.append(Walk(options.seed + i, scale, options.device, shared, part))
    share = options.operations // options.threads
    forks = options.device == "sim" and options.threads == 1
    # Torch 2.11 counts a lazy clone's owners wrong when there is no memory to make it a real one.
    lazy = not options.ram
    failures, over = [], threading.Event()

    def run(one):
        try:
            one.run(share, forks, options.faults, lazy)
        except BaseException as failure:  # A thread's SystemExit would be lost.
            failures.append(failure)

    def storm():
        while options.storm and not over.is_set():
            extension.evict_all()

    threads = [threading.Thread(target=run, args=(one,)) for one in walks]
    storming = threading.Thread(target=storm)
    for thread in [*threads, storming]:
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    storming.join()
    if failures:
        raise failures[0]
    return sum(one.compared for one in walks), sum(one.exhausted for one in walks)


def check_baseline():
    gc.collect()
    for _ in range(3):
        torch.ones(1).add_(1)  # Brief pins end at boundaries.
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
    parser.add_argument("--faults", action="store_true", help="copies are refused at times (sim)")
    parser.add_argument("--storm", action="store_true", help="another thread evicts all the time")
    parser.add_argument("--ram", help="so little host memory that it runs out at times")
    parser.add_argument(
        "--small", action="store_true", help="small storages, many operations (sim)"
    )
    parser.add_argument("--verify", action="store_true", help="no write may go unnoticed")
    return parser.parse_args()


def main(options):
    compared, exhausted = walk(options)
    if options.faults:
        extension.sim_faults(0, 2**63)
    stats = check_baseline()
    if stats["verify_faults"]:
        raise SystemExit(f"walk: {stats['verify_faults']} writes were not announced")
    keys = ("evicted", "restored", "in_place", "spilled", "returned")
    moved = {key: stats[f"{key}_bytes"] >> 10 for key in keys}
    print(
        f"walk: {options.operations} operations, {compared} comparisons, no difference; "
        f"KiB {moved}, moves refused {stats['failures']}, memory exhausted {exhausted}"
    )
    return 0


def switch_on(options):
    scale = Scale(options.small)
    keys = {"vram": scale.budget, "min_storage": scale.min_storage, "verify": options.verify}
    keys |= {"ram": options.ram} if options.ram else {}
    print(f"walk: seed {options.seed}, device {options.device}, {keys}", flush=True)
    trainstream.enable(device=options.device, **keys)
    from trainstream import _C

    return _C


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    choices = parse_command_line()
    extension = switch_on(choices)
    sys.exit(main(choices))
