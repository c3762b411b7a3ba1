"""One optimizer step by each engine, against torch's fused CPU AdamW and against host memory.

    python bench/optimizer_engines.py [--parameters 400000000] [--folder bench/results]

Every engine's weights are compared with the host engine's, bit for bit. What is compared in speed
takes turns, step by step: hosts are shared, and what they give changes within seconds. The ceilings
are measured in the same run: cores alone (read, change, write), and cores and copies in both
directions at once, which share host memory. Without a GPU only the host part runs.
"""

import argparse
import gc
import itertools
import os
import statistics
import threading
import time

import results
import torch

import trainstream.optim

TENSOR_ELEMENTS = 16_000_000
# Bytes of host memory that one parameter touches: bfloat16 weights and gradients on the device.
# Cores: weight, gradient, remainder and moments read, all but the gradient written, and the copies
# of weight and gradient in and weight out. Kernel: remainder and moments read and written.
CORE_BYTES = {"float32": (2 + 2 + 2 + 8) + (2 + 2 + 8) + 4 + 2, "bfloat16": 10 + 8 + 4 + 2}
KERNEL_BYTES = {"float32": 2 * (2 + 8), "bfloat16": 2 * (2 + 4)}
CPU_FP32_BYTES = 16 + 12
ENGINES = ("host", "stream", "hybrid")
CONTROL = "host, a second one"


def make(device, dtype, parameters):
    g = torch.Generator().manual_seed(0)
    count = max(1, parameters // TENSOR_ELEMENTS)
    params = []
    for _ in range(count):
        base = torch.randn(min(parameters, TENSOR_ELEMENTS), generator=g)
        p = torch.nn.Parameter((base * 0.02).to(dtype).to(device))
        p.grad = (base.flip(0) * 1e-3).to(dtype).to(device)
        params.append(p)
    return params


def wait_for(optimizer):
    """Ours may update on after step() returns."""
    if isinstance(optimizer, trainstream.optim.AdamW):
        optimizer.synchronize()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_steps(optimizers, steps):
    """Seconds of a step of each, taking turns; the first two do not count.

    In every order: cores that slept through a kernel's step are slower in the next one.
    """
    seconds = [[] for _ in optimizers]
    orders = itertools.cycle(itertools.permutations(zip(optimizers, seconds, strict=True)))
    for order in itertools.islice(orders, steps + 2):
        for optimizer, taken in order:
            wait_for(optimizer)
            start = time.perf_counter()
            optimizer.step()
            wait_for(optimizer)
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[2:]) for taken in seconds]


def core_ceiling(seconds=1.0, until=None):
    """Bytes a second of three fp32 arrays read, changed and written by all cores."""
    arrays = [torch.zeros(200_000_000) for _ in range(3)]
    for a in arrays:
        a.add_(1)
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds if until is None else not until.is_set():
        for a in arrays:
            a.add_(1)
            done += a.nbytes * 2
    return done / (time.perf_counter() - start)


def copy_ceiling(seconds, directions):
    """Bytes a second over the link, all directions added up."""
    size = 256 << 20
    jobs = []
    for direction in directions:
        host, device = torch.empty(size, dtype=torch.uint8).pin_memory(), None
        device = torch.empty(size, dtype=torch.uint8, device="cuda")
        stream = torch.cuda.Stream()
        target, source = (host, device) if direction == "to host" else (device, host)
        jobs.append((target, source, stream))
    torch.cuda.synchronize()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for target, source, stream in jobs:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    target.copy_(source, non_blocking=True)
                    done += size
        for _, _, stream in jobs:
            stream.synchronize()
    return done / (time.perf_counter() - start)


def combined_ceiling(seconds=2.0):
    """Cores and copies both ways at once."""
    stop, rates = threading.Event(), {}
    cores = threading.Thread(target=lambda: rates.update(cores=core_ceiling(until=stop)))
    cores.start()
    time.sleep(1.5)  # The arrays are made and touched.
    rates["copies"] = copy_ceiling(seconds, ("to host", "to device"))
    stop.set()
    cores.join()
    return rates


def host_part(rows, parameters, steps):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    params = make("cpu", torch.float32, parameters)
    both = torch.optim.AdamW(params, fused=True), trainstream.optim.AdamW(params, engine="host")
    stock, ours = median_steps(both, steps)
    ceiling = core_ceiling()
    count = sum(p.numel() for p in params)
    rows.add("cpu fp32, torch fused AdamW", stock / count * 1e9, "ns/param")
    rows.add("cpu fp32, host engine", ours / count * 1e9, "ns/param")
    rows.add("cpu fp32, host engine against torch fused", ours / stock, "ratio")
    rows.add("cores alone, read change write", ceiling / 1e9, "GB/s")
    rows.add("cpu fp32, host engine", CPU_FP32_BYTES * count / ours / 1e9, "GB/s")
    rows.add(
        "cpu fp32, host engine, share of that", CPU_FP32_BYTES * count / ours / ceiling, "ratio"
    )


def gpu_part(rows, parameters, steps):
    both = combined_ceiling()
    ceiling = both["cores"] + both["copies"]
    rows.add("copies alone, both ways", copy_ceiling(1.0, ("to host", "to device")) / 1e9, "GB/s")
    rows.add("cores beside copies", both["cores"] / 1e9, "GB/s")
    rows.add("copies beside cores", both["copies"] / 1e9, "GB/s")
    rows.add("host memory, cores and copies together", ceiling / 1e9, "GB/s")
    for moments in ("float32", "bfloat16"):
        compare_engines(rows, moments, parameters, steps, ceiling)
        gc.collect()


def compare_engines(rows, moments, parameters, steps, ceiling):
    """`ceiling`: bytes a second that cores and copies together get from host memory."""
    names = (*ENGINES, CONTROL)
    params = {name: make("cuda", torch.bfloat16, parameters) for name in names}
    optimizers = {
        name: trainstream.optim.AdamW(params[name], engine=name.partition(",")[0], moments=moments)
        for name in names
    }
    times = dict(zip(names, median_steps(list(optimizers.values()), steps), strict=True))
    for engine in ENGINES:
        optimizer = optimizers[engine]
        count = sum(p.numel() for p in params[engine])
        pairs = zip(params["host"], params[engine], strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs)
        share = optimizer.share[0] / sum(optimizer.share)
        touched = share * CORE_BYTES[moments] + (1 - share) * KERNEL_BYTES[moments]
        bound = touched * count / ceiling
        name = f"cuda bf16, moments {moments}, {engine}"
        rows.add(name, times[engine] / count * 1e9, "ns/param")
        rows.add(f"{name}, bits of the host engine", int(equal), "bool")
        rows.add(f"{name}, host share", share, "ratio")
        rows.add(f"{name}, bytes touched", touched, "B/param")
        rows.add(f"{name}, rate", touched * count / times[engine] / 1e9, "GB/s")
        rows.add(f"{name}, bound by host memory", bound / count * 1e9, "ns/param")
        rows.add(f"{name}, share of the bound", bound / times[engine], "ratio")
    better = min(times["host"], times["stream"])
    rows.add(f"moments {moments}, hybrid against better", times["hybrid"] / better, "ratio")
    rows.add(f"moments {moments}, {CONTROL} against host", times[CONTROL] / times["host"], "ratio")


class Rows(list):
    def add(self, name, value, unit):
        self.append((name, value, unit))
        print(f"{name:<60} {value:.4g} {unit}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=400_000_000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    rows = Rows()
    host_part(rows, options.parameters, options.steps)
    hardware = "cpu"
    if torch.cuda.is_available():
        gpu_part(rows, options.parameters, options.steps)
        hardware = torch.cuda.get_device_name()
    if options.folder:
        versions = {"torch": torch.__version__}
        print(results.write("optimizer-engines", hardware, versions, rows, options.folder))


if __name__ == "__main__":
    main()
