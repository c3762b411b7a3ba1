"""The largest batch that trains under a budget: stock, and with activations spilled.

    python bench/largest_batch.py [--shape 1.26b] [--length 2048] [--budget 25769803776] [--steps 5]

Stock may reserve no more than the budget; its largest batch is found by trying. Then batches twice,
three and four times as large train under it with `trainstream.spill_activations()`; the gradients
of the last step of each must be those of stock with the whole device.
"""

import argparse
import statistics
import sys

import activations
import decoder
import results
import torch


def run(options, sequences, way, cap=0):
    options.sequences = sequences
    return activations.run(options, options.length, way, cap)


def largest_of_stock(options):
    """In sequences; 0: not even one."""
    sequences = 0
    while run(options, sequences + 1, activations.STOCK, options.budget) is not None:
        sequences += 1
    return sequences


def rows_of(options, sequences):
    """Of one batch under the budget; empty where it does not train."""
    name = f"{sequences} sequences"
    ours = run(options, sequences, "auto")
    if ours is None:
        return []
    stock = run(options, sequences, activations.STOCK)
    rows = activations.rows_of(name, ours, stock, rates=None)
    within = ours["counters"][-2]["reserved_peak_bytes"] <= options.budget
    rows.append((f"{name}: within the budget", int(within), "bool"))
    if stock is not None:
        seconds = statistics.median(stock["seconds"][2:])
        rows.append((f"{name}: stock's step with the whole device", seconds, "s"))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.26b", choices=decoder.SHAPES)
    parser.add_argument("--length", type=int, default=2048, help="of sequences, in tokens")
    parser.add_argument("--budget", type=int, default=24 * 2**30, help="bytes")
    parser.add_argument("--steps", type=int, default=5, help="at least 4")
    parser.add_argument("--times", default="2,3,4", help="stock's largest batch")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    options = parser.parse_args()
    options.device, options.conf, options.shortest = "cuda", "", 0
    stock = largest_of_stock(options)
    rows = [("budget", options.budget, "bytes"), ("largest batch of stock", stock, "sequences")]
    largest = 0
    for times in map(int, options.times.split(",")) if stock else ():
        found = rows_of(options, times * stock)
        rows += found
        if not found:
            break
        largest = times * stock
    rows.append(("largest batch tried that trains", largest, "sequences"))
    for name, value, unit in rows:
        print(f"{name:60} {value:.6g} {unit}")
    if options.name:
        versions = {"torch": torch.__version__}
        hardware = torch.cuda.get_device_name()
        print(results.write(options.name, hardware, versions, rows, options.folder))
    good = all(value == 1 for name, value, unit in rows if unit == "bool")
    return 0 if good and stock and largest >= 2 * stock else 1


if __name__ == "__main__":
    sys.exit(main())
