"""One job under one budget after the other: none over it, none slower than the next smaller one.

    python bench/budgets.py [--shape 7.62b] [--budgets 8,12,18,24,40,60] [--steps 9] \
        [--longer 5] [--device cuda]

Each budget, in GiB (on the CPU in MiB), has a process of its own; the same losses are asked of all
of them and of stock, bit for bit. With --longer N the batch of step N is four times as large, in
all of them: the run must go on, and its plan with it. A step is the median of those after the
plan's first two.
"""

import argparse
import statistics
import sys

import main_job
import results

# Steps that do not count: two on demand, and two in which the plan measures its arena.
WARM_UP = 4
# By how much a step may be slower than under less memory: hosts are shared.
NOISE = 0.03


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7.62b")
    parser.add_argument("--budgets", default="8,12,18,24,40,60", help="GiB, MiB on the CPU")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--longer", type=int, help="step of a batch four times as large, from 0 on")
    parser.add_argument("--kind", default="stock")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--conf", default="", help="further configuration")
    parser.add_argument("--name", default="budgets")
    parser.add_argument("--folder")
    return parser.parse_args()


def train(options, conf=None):
    worker = main_job.Worker(options, conf)
    for step in range(options.steps):
        worker.step(times=4 if step == options.longer else 1)
    return worker.end()


def usual_seconds(options, records):
    usual = [s["seconds"] for i, s in enumerate(records.steps) if i != options.longer]
    return statistics.median(usual[min(WARM_UP, len(usual) - 1) :])


def rows_of(options, stock, records, vram):
    """What one budget gave, and whether all was right."""
    equal = records.losses() == stock.losses() and records.weights == stock.weights
    seconds, peak = usual_seconds(options, records), main_job.peak_held(records)
    rows = [
        ("losses and weights bit-equal", int(equal), "bool"),
        (f"step, median after {WARM_UP}", seconds, "s"),
        ("step against stock", seconds / usual_seconds(options, stock), "ratio"),
        ("peak reserved", peak, "bytes"),
        ("peak reserved within budget", int(peak <= vram), "bool"),
        ("plans made", records.steps[-1]["ts_plans"], "count"),
        *main_job.foretold(records, seconds),
    ]
    if options.longer is not None:
        rows.append(("the longer step", records.steps[options.longer]["seconds"], "s"))
    return rows, equal and peak <= vram


def main():
    options = arguments()
    unit, word = (2**30, "GiB") if options.device == "cuda" else (2**20, "MiB")
    stock = train(options)
    rows = [("stock: step", usual_seconds(options, stock), "s")]
    right, seconds = stock.is_finite(), []
    for budget in map(float, options.budgets.split(",")):
        vram = int(budget * unit)
        records = train(options, main_job.conf_of(options, vram))
        found, is_right = rows_of(options, stock, records, vram)
        seconds.append(usual_seconds(options, records))
        if len(seconds) > 1:
            slower = seconds[-1] / seconds[-2]
            found.append(("step against the next smaller budget", slower, "ratio"))
        right = right and is_right
        for name, value, unit_ in found:
            rows.append((f"{budget:g} {word}: {name}", value, unit_))
            print("{:60} {:.6g} {}".format(*rows[-1]), flush=True)
    falling = [b <= a * (1 + NOISE) for a, b in zip(seconds, seconds[1:], strict=False)]
    rows.append(("none slower than with less, noise aside", int(all(falling)), "bool"))
    print("{:60} {:.6g} {}".format(*rows[-1]))
    if options.folder:
        versions = {"torch": stock.built["torch"]}
        hardware = stock.built["hardware"]
        print(results.write(options.name, hardware, versions, rows, options.folder))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
