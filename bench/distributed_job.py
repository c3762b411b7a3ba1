"""Several ranks under torchrun, each under a budget, against the same script without.

    python bench/distributed_job.py --kind fsdp2 --ranks 2 [--shape 1.26b] [--budget 0.4] \
        [--compare-offload]

bench/distributed_worker.py trains under DistributedDataParallel or FSDP2, first stock, then with
PYTORCH_TRAINSTREAM=1. `vram` is of each process, so all ranks have the same budget: a share is one
of the smallest of their stock peaks. Losses and final weights (FSDP2: each rank's shards) are
compared bit for bit on every rank. --compare-offload trains with FSDP2's CPUOffloadPolicy, too; the
kind fsdp2-offload does nothing else. With --device cpu the ranks talk over gloo and the device is
simulated; a third run that fits tells the peaks, which stock PyTorch does not know there.

The exit status is 1 when bits differ, losses are no numbers, a rank went past its budget, or
nothing had to leave on some rank (unless --may-fit says so).
"""

import argparse
import os
import pathlib
import sys
import tempfile

import main_job
import results

KINDS = ("ddp", "fsdp2", "fsdp2-offload")
SKIP_STEPS = 2  # Warm-up, left out of medians.


def run_ranks(options, kind, conf=None):
    """The records of every rank, once all have ended."""
    # The launcher's default is one thread a rank, which an optimizer on the host would suffer from.
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    threads = os.environ.get("OMP_NUM_THREADS", str(threads))
    with tempfile.TemporaryDirectory() as folder:
        main_job.run_to_end(command_of(options, kind, folder), conf, OMP_NUM_THREADS=threads)
        paths = [pathlib.Path(folder) / f"rank{rank}.jsonl" for rank in range(options.ranks)]
        return [main_job.Records.read_from(path) for path in paths]


def command_of(options, kind, folder):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks)]
    command += [str(main_job.FOLDER / "distributed_worker.py"), "--folder", folder]
    command += ["--kind", kind, "--shape", options.shape, "--device", options.device]
    command += ["--steps", str(options.steps), "--length", str(options.length)]
    command += ["--sequences", str(options.sequences)]
    return command + (["--random-lengths"] if options.random_lengths else [])


def stock_peaks(options, stock):
    """Bytes allocated at most, of each rank."""
    if options.device == "cuda":
        return [records.steps[-1]["allocated_peak_bytes"] for records in stock]
    roomy = run_ranks(options, options.kind, main_job.conf_of(options, main_job.ROOMY))
    return [main_job.peak_held(records) for records in roomy]


def compare(options):
    """Stock, then under the budget. Returns all ranks' records, rows and whether all was well."""
    stock = run_ranks(options, options.kind)
    peaks = stock_peaks(options, stock)
    vram = int(options.budget * min(peaks) if options.budget <= 1 else options.budget)
    ours = run_ranks(options, options.kind, main_job.conf_of(options, vram))
    equal_losses, equal_weights = bits_equal(stock, ours)
    finite = all(records.is_finite() for records in ours)
    within = all(main_job.peak_held(records) <= vram for records in ours)
    evicted = min(records.steps[-1]["ts_evicted_bytes"] for records in ours)
    times = slowest(stock), slowest(ours)
    rows = [
        ("ranks", options.ranks, "count"),
        ("budget of each rank", vram, "bytes"),
        ("steps compared", len(ours[0].steps), "steps"),
        ("losses bit-equal on every rank", int(equal_losses), "bool"),
        ("final weights bit-equal on every rank", int(equal_weights), "bool"),
        ("losses finite", int(finite), "bool"),
        ("every rank's peak within the budget", int(within), "bool"),
        ("evicted on the rank with the least", evicted, "bytes"),
        ("stock step, median after 2", times[0], "s"),
        ("step, median after 2", times[1], "s"),
        ("step against stock", times[1] / times[0], "ratio"),
    ]
    for rank, both in enumerate(zip(stock, ours, peaks, strict=True)):
        rows += [(f"rank {rank}: {name}", *rest) for name, *rest in rows_of_rank(*both, vram)]
    first = main_job.foretold(ours[0], times[1])
    first += main_job.per_step(ours[0]) + main_job.after_second_step(ours[0])
    rows += [(f"rank 0: {name}", *rest) for name, *rest in first]
    if options.repeat_stock:
        again = all(bits_equal(stock, run_ranks(options, options.kind)))
        rows.append(("stock has its own bits again", int(again), "bool"))
    good = equal_losses and equal_weights and finite and within
    good = good and (evicted > 0 or options.may_fit)
    return ours, rows, good


def bits_equal(some, others):
    """Of the losses and of the final weights, on every rank."""
    both = list(zip(some, others, strict=True))
    return all(a.losses() == b.losses() for a, b in both), all(
        a.weights == b.weights for a, b in both
    )


def slowest(ranks):
    """The median step of the rank that took longest. They wait for one another, so all are near."""
    return max(records.median_seconds(SKIP_STEPS) for records in ranks)


def rows_of_rank(stock, ours, peak, vram):
    last = ours.steps[-1]
    return [
        ("stock peak allocated", peak, "bytes"),
        ("stock peak reserved", main_job.peak_of(stock, "reserved_peak_bytes"), "bytes"),
        ("budget share of stock peak", vram / peak, "ratio"),
        ("peak held", main_job.peak_held(ours), "bytes"),
        ("device in use after the last step", last.get("device_used_bytes", 0), "bytes"),
        ("evicted", last["ts_evicted_bytes"], "bytes"),
        ("first loss", float.fromhex(ours.losses()[0]), "nats"),
        ("last loss", float.fromhex(ours.losses()[-1]), "nats"),
        ("stock step, median after 2", stock.median_seconds(SKIP_STEPS), "s"),
        ("step, median after 2", ours.median_seconds(SKIP_STEPS), "s"),
        *growth(ours),
    ]


def growth(records):
    """Host memory after the longest step, once states exist, and at the end: it should not grow."""
    longest = max(records.steps[SKIP_STEPS:], key=lambda step: step["tokens"])
    rows = [("tokens of the longest step after 2", longest["tokens"], "tokens")]
    for key, name in (
        ("rss_bytes", "resident set peak"),
        ("ts_page_locked_bytes", "page-locked"),
    ):
        rows += [
            (f"{name} after that step", longest[key], "bytes"),
            (f"{name} at the end", records.steps[-1][key], "bytes"),
        ]
    return rows


def offload_rows(ranks):
    """FSDP2 with CPUOffloadPolicy, stock."""
    rows = [("offload: step, median after 2", slowest(ranks), "s")]
    for rank, records in enumerate(ranks):
        last = records.steps[-1]
        rows += [
            (f"offload: rank {rank}: peak reserved", last.get("reserved_peak_bytes", 0), "bytes"),
            (f"offload: rank {rank}: resident set peak", last["rss_bytes"], "bytes"),
            (f"offload: rank {rank}: last loss", float.fromhex(last["loss"]), "nats"),
        ]
    return rows


def measure(options):
    if options.kind == "fsdp2-offload":
        rival = run_ranks(options, options.kind)
        return rival, offload_rows(rival), True
    ours, rows, good = compare(options)
    if options.compare_offload:
        rival = run_ranks(options, "fsdp2-offload")
        rows += offload_rows(rival)
        ratio = slowest(rival) / slowest(ours)
        rows.append(("offload: its step against trainstream's", ratio, "ratio"))
    return ours, rows, good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=KINDS, default="fsdp2", help="the last is no run of ours")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="1.26b", help="of bench/qwen2.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=0.4, help="share of stock's peak, or bytes")
    parser.add_argument("--steps", type=int, default=12, help=f"more than {SKIP_STEPS}")
    parser.add_argument("--sequences", type=int, default=4, help="of each rank")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument(
        "--random-lengths", action="store_true", help="from an eighth of --length to all"
    )
    parser.add_argument("--conf", default="", help="more of trainstream's settings")
    parser.add_argument("--may-fit", action="store_true", help="no fault if nothing had to leave")
    parser.add_argument("--repeat-stock", action="store_true", help="do stock's bits repeat?")
    parser.add_argument("--compare-offload", action="store_true", help="FSDP2's own, too")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.steps <= SKIP_STEPS:
        parser.error(f"--steps {options.steps}: the first {SKIP_STEPS} are not measured")
    ranks, rows, good = measure(options)
    for name, value, unit in rows:
        print(f"{name:48} {value:.6g} {unit}")
    if options.name:
        built = ranks[0].built
        hardware = f"{options.ranks} x {built['hardware']}"
        versions = {"torch": built["torch"]}
        print(results.write(options.name, hardware, versions, rows, options.folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
