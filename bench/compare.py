"""trainstream and its rivals on one model, one number of tokens and one budget.

    python bench/compare.py [--shape 1.26b] [--budget 0.4] [--steps 8] [--only stock,fsdp2-offload]

Stock PyTorch first: its peak is what a budget below 1 is a share of. Then trainstream under the
budget, with the stock optimizer (same bits) and with its own; then the rivals, which know no
budget: what they take is set beside it. Each in a process of its own, one after the other; what
cannot be imported is skipped, and what fails is kept in the table, both with the reason.
"""

import argparse
import importlib.metadata
import sys

import main_job
import results

SKIP_STEPS = 2  # Warm-up, left out of medians.
# (name in the table, kind of rivals.KINDS, whether trainstream is on)
CONTENDERS = [
    ("stock", "stock", False),
    ("trainstream", "stock", True),
    ("trainstream-optimizer", "host-optimizer", True),
    ("fsdp2-offload", "fsdp2-offload", False),
    ("torchao-offload", "torchao-offload", False),
    ("deepspeed-zero3", "deepspeed-zero3", False),
    ("bitsandbytes-paged", "bitsandbytes-paged", False),
]
LIBRARIES = ("transformers", "torchao", "deepspeed", "bitsandbytes")
COLUMNS = ("step s", "tokens/s", "device GiB", "host GiB", "last loss")
GIB = 2**30


def run(options, kind, conf):
    """The worker after its steps, and "ok"; or None and why not."""
    try:
        return main_job.train(options, conf, kind), "ok"
    except SystemExit as ended:
        return None, str(ended)


def measured(options, worker):
    """(what, value, unit) of one contender."""
    last, seconds = worker.steps[-1], worker.median_seconds(SKIP_STEPS)
    device = last.get("reserved_peak_bytes", last.get("ts_peak_bytes", 0))
    return [
        ("step", seconds, "s"),
        ("tokens a second", options.sequences * options.length / seconds, "1/s"),
        ("device memory, peak", device, "bytes"),
        ("device in use after the last step", last.get("device_used_bytes", 0), "bytes"),
        ("resident set, peak", last["rss_bytes"], "bytes"),
        ("build", worker.built["seconds"], "s"),
        ("last loss", float.fromhex(worker.losses()[-1]), "nats"),
    ]


def budget_bytes(options, stock):
    """Bytes; a share is one of stock's peak, which only a GPU can tell."""
    if options.budget > 1:
        return int(options.budget)
    peak = stock.steps[-1].get("allocated_peak_bytes", 0) if stock else 0
    if peak == 0:
        raise SystemExit("a share needs stock's peak on a GPU; give --budget in bytes")
    return int(options.budget * peak)


def compare(options):
    """Every contender's worker and status, by name, and the budget."""
    only = options.only.split(",") if options.only else [name for name, _, _ in CONTENDERS]
    unknown = set(only) - {name for name, _, _ in CONTENDERS}
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}")
    done, budget = {}, None
    for name, kind, is_on in CONTENDERS:
        if name not in only:
            continue
        if budget is None and is_on:
            budget = budget_bytes(options, done.get("stock", (None, ""))[0])
        conf = main_job.conf_of(options, budget) if is_on else None
        done[name] = run(options, kind, conf)
        print(f"{name}: {done[name][1]}", file=sys.stderr, flush=True)
    return done, budget


def rows_of(options, done, budget):
    rows = [
        ("budget", budget or 0, "bytes"),
        ("tokens a step", options.sequences * options.length, "tokens"),
    ]
    for name, (worker, status) in done.items():
        rows.append((f"{name}: status", status, "text"))
        if worker is not None:
            values = measured(options, worker)
            rows += [(f"{name}: {what}", value, unit) for what, value, unit in values]
    stock, ours = (done.get(name, (None, ""))[0] for name in ("stock", "trainstream"))
    if stock is not None and ours is not None:
        equal = stock.losses() == ours.losses() and stock.weights == ours.weights
        rows.append(("trainstream: losses and weights bit-equal to stock", int(equal), "bool"))
    return rows


def library_versions():
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # Its contender was skipped, with the reason.
    return versions


def print_table(options, done):
    print(f"{'':24}" + "".join(f"{title:>12}" for title in COLUMNS))
    for name, (worker, status) in done.items():
        if worker is None:
            print(f"{name:24}  {status[:100]}")
            continue
        found = {what: value for what, value, _ in measured(options, worker)}
        device = found["device memory, peak"] / GIB
        cells = [f"{found['step']:.3f}", f"{found['tokens a second']:.0f}"]
        cells += [f"{device:.2f}" if device else "-", f"{found['resident set, peak'] / GIB:.2f}"]
        cells.append(f"{found['last loss']:.4f}")
        print(f"{name:24}" + "".join(f"{cell:>12}" for cell in cells))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.26b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=0.4, help="share of stock's peak, or bytes")
    parser.add_argument("--steps", type=int, default=8, help=f"more than {SKIP_STEPS}")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--conf", default="", help="more of trainstream's settings")
    parser.add_argument("--only", default="", help="names, separated by commas; default all")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    options = parser.parse_args()
    done, budget = compare(options)
    rows = rows_of(options, done, budget)
    print_table(options, done)
    ran = [worker for worker, _ in done.values() if worker is not None]
    if options.name and ran:
        versions = {"torch": ran[0].built["torch"], **library_versions()}
        hardware = ran[0].built["hardware"]
        print(results.write(options.name, hardware, versions, rows, options.folder))
    equal = dict((what, value) for what, value, _ in rows).get(
        "trainstream: losses and weights bit-equal to stock", 1
    )
    return 0 if ran and equal else 1


if __name__ == "__main__":
    sys.exit(main())
