"""What activations cost: kept, spilled by share, and by torch's own save_on_cpu.

    python bench/activations.py [--shape 1.26b] [--device cuda] [--lengths 2048,8192]
        [--sequences 4] [--shares 0.5,1,auto] [--budget 17179869184] [--steps 8] [--shortest 256]

For each length a process for each way trains the same model without checkpointing: stock,
save_on_cpu, trainstream with no hooks (on demand), and trainstream.spill_activations() by each
share. The gradients of the last step must be stock's, bit for bit. With --shortest the steps after
the first two are of random lengths from there on. Prints a line of JSON for each row of name, value
and unit.

What leaves does so in forward and comes back in backward, so the link bound is the sum of both
ways, each by the rate that plain copies reach on this machine in the same run.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import decoder
import results
import torch

STOCK, SAVE_ON_CPU, ON_DEMAND, LINK = "stock", "save_on_cpu", "on demand", "link"
_COPIED_BYTES, _COPIES = 2**30, 8


def context_of(way, device):
    """What is around the forward pass."""
    if way == SAVE_ON_CPU:
        return torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda")
    if way in (STOCK, ON_DEMAND):
        return contextlib.nullcontext()
    import trainstream

    return trainstream.spill_activations("auto" if way == "auto" else float(way))


def digest(model):
    whole = hashlib.sha256()
    for param in model.parameters():
        whole.update(bytes(param.grad.detach().cpu().reshape(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()


def counters(device):
    with open("/proc/self/statm", encoding="ascii") as file:
        found = {"rss_bytes": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    if device == "cuda":
        found["driver_allocations"] = torch.cuda.memory_stats()["num_device_alloc"]
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved()
    extension = sys.modules.get("trainstream._C")
    return found | ({} if extension is None else extension.stats())


def link_rates():
    """Bytes a second to the host and to the device, of plain copies one way at a time."""
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    rates = []
    for target, source in ((host, device), (device, host)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_COPIES):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(_COPIES * _COPIED_BYTES / (time.perf_counter() - start))
    return rates


def work(options):
    """Trains in this process, and prints what was found as one line of JSON."""
    if options.way == LINK:
        print(json.dumps(link_rates()))
        return
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    if options.cap:
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(options.cap / total)
    where = "cuda" if options.device == "cuda" else "cpu"
    sync = torch.cuda.synchronize if where == "cuda" else (lambda: None)
    with torch.device(where):  # Its numbers are drawn where it trains: a core takes half a minute.
        model = decoder.Decoder(options.shape).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    vocabulary = decoder.SHAPES[options.shape][-1]
    generator = torch.Generator().manual_seed(1)
    seconds, found = [], []
    lengths = random.Random(2)
    for step in range(options.steps):
        length = options.length
        if options.shortest and step >= 2:
            length = lengths.randint(options.shortest, length)
        size = (options.sequences, length)
        ids = torch.randint(0, vocabulary, size, generator=generator).to(where)
        sync()
        start = time.perf_counter()
        with context_of(options.way, where):
            loss = model(ids)
        loss.backward()
        grads = digest(model) if step == options.steps - 1 else ""
        if not grads:
            optimizer.step()
            optimizer.zero_grad()
            sync()
            seconds.append(time.perf_counter() - start)
        found.append(counters(where))
    answer = {"seconds": seconds, "loss": loss.item().hex(), "grads": grads, "counters": found}
    print(json.dumps(answer))


def run(options, length, way, cap=0):
    """The answer of a process of its own; None where it failed, as one that does not fit may.

    Args:
        cap: Bytes of the device that stock may reserve; 0: all.
    """
    environment = {k: v for k, v in os.environ.items() if "TRAINSTREAM" not in k}
    path = [str(results.ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    if way not in (STOCK, SAVE_ON_CPU, LINK):
        vram = options.budget or "auto"
        conf = f"device:{options.device},vram:{vram}" + (options.conf and f",{options.conf}")
        environment.update(PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF=conf)
    command = [sys.executable, __file__, "--way", way, "--length", str(length), "--cap", str(cap)]
    for name in ("shape", "device", "sequences", "steps", "shortest"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{length} {way}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(name, answer, stock, rates):
    """Of one way: its step, its memory, what it moved, and whether its bits are stock's.

    Args:
        rates: As link_rates(); None: there is no link.
    """
    step = statistics.median(answer["seconds"][2:])
    last, before = answer["counters"][-2], answer["counters"][-3]
    rows = [(f"{name}: step, median after 2", step, "s")]
    if stock is not None:
        same = all(answer[key] == stock[key] for key in ("loss", "grads"))
        rows.append((f"{name}: gradients bit-equal to stock", int(same), "bool"))
        against = step / statistics.median(stock["seconds"][2:])
        rows.append((f"{name}: step against stock", against, "ratio"))
    for key in ("allocated_peak_bytes", "reserved_peak_bytes", "peak_bytes"):
        if key in last:
            rows.append((f"{name}: {key.replace('_', ' ')[:-6]}", last[key], "bytes"))
    if "spilled_bytes" in last:
        kinds = ("spilled", "returned", "evicted", "restored", "in_place")
        moved = {kind: last[f"{kind}_bytes"] - before[f"{kind}_bytes"] for kind in kinds}
        rows += [(f"{name}: {kind} in a step", moved[kind], "bytes") for kind in kinds]
        if rates is not None and stock is not None:
            link_seconds = moved["evicted"] / rates[0] + moved["restored"] / rates[1]
            rows += bound_rows(name, step, stock, link_seconds)
    return rows + growth_rows(name, answer["counters"])


def bound_rows(name, step, stock, link_seconds):
    """The step against the larger one of computing, which is stock's step, and of copying."""
    bound = max(link_seconds, statistics.median(stock["seconds"][2:]))
    return [
        (f"{name}: link bound", link_seconds, "s"),
        (
            f"{name}: step against the larger one of stock's and the link bound",
            step / bound,
            "ratio",
        ),
    ]


def growth_rows(name, counts):
    """What grew after step 2; the process itself after a tenth of the steps."""
    second, tenth, last = counts[1], counts[max(1, len(counts) // 10)], counts[-2]
    rows = [(f"{name}: resident set after a tenth of the steps", tenth["rss_bytes"], "bytes")]
    rows.append((f"{name}: resident set at the end", last["rss_bytes"], "bytes"))
    for key, unit in (
        ("page_locks", "count"),
        ("page_locked_bytes", "bytes"),
        ("driver_allocations", "count"),
    ):
        if key in last:
            words = key.replace("_", " ")
            rows.append((f"{name}: {words} after step 2", last[key] - second[key], unit))
    if "failures" in last:
        rows.append((f"{name}: copies refused", last["failures"], "count"))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="tiny", choices=decoder.SHAPES)
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--lengths", default="2048,8192", help="of sequences, in tokens")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--shares", default="0.5,1,auto")
    parser.add_argument("--skip", default="", help="such as save_on_cpu, which takes long")
    parser.add_argument("--budget", type=int, default=0, help="bytes; 0: what there is")
    parser.add_argument("--conf", default="", help="more of trainstream's settings")
    parser.add_argument("--steps", type=int, default=8, help="at least 4")
    parser.add_argument("--shortest", type=int, default=0, help="tokens; 0: as long as the longest")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        work(options)
        return 0
    rows, good = [], True
    rates = None
    if options.device == "cuda":
        rates = run(options, 0, LINK)
        rows += zip(("link to the host", "link to the device"), rates, ["B/s", "B/s"], strict=True)
    rivals = [way for way in (SAVE_ON_CPU, ON_DEMAND) if way not in options.skip.split(",")]
    for length in map(int, options.lengths.split(",")):
        stock = None
        for way in (STOCK, *rivals, *options.shares.split(",")):
            name = f"{length} tokens, {way if way.isalpha() or ' ' in way else 'share ' + way}"
            name = f"{length} tokens, {way}" if way == SAVE_ON_CPU else name
            answer = run(options, length, way)
            if answer is None:
                rows.append((f"{name}: failed", 1, "bool"))
                good = good and way == STOCK  # Stock alone may not fit.
                continue
            stock = answer if way == STOCK else stock
            found = rows_of(name, answer, stock, rates)
            for row in found:  # At once: a run that is ended early has shown what it had.
                print(
                    json.dumps(dict(zip(("name", "value", "unit"), row, strict=True))), flush=True
                )
            rows += found
    good = good and all(value == 1 for name, value, _ in rows if "bit-equal" in name)
    if options.name:
        hardware = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        versions = {"torch": torch.__version__}
        print(results.write(options.name, hardware, versions, rows, options.folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
