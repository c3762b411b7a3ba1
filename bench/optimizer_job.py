"""Full fine-tuning with masters and moments in host memory, under a budget, against its rivals.

    python bench/optimizer_job.py [--shape 7.62b] [--budget 19327352832] [--steps 8]

Four processes, one after the other, train the same model: trainstream's AdamW (bfloat16 moments,
updates during backward) under the budget; the same without a budget, which must give the same
losses and weights bit for bit; torch's AdamW on the GPU; FSDP2 with CPUOffloadPolicy.
"""

import argparse
import math
import sys

import main_job
import results

# Bytes of host memory a parameter: bfloat16 weight, remainder, two bfloat16 moments.
FORMULA_BYTES = 2 + 2 + 2 + 2


def report(rows, name, worker):
    last = worker.steps[-1]
    rows += [
        (f"{name}: step, median after 2", worker.median_seconds(2), "s"),
        (f"{name}: build", worker.built["seconds"], "s"),
        (f"{name}: reserved, peak", last["reserved_peak_bytes"], "bytes"),
        (f"{name}: resident set, peak", last["rss_bytes"], "bytes"),
        (f"{name}: last loss", float.fromhex(worker.losses()[-1]), "nats"),
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="7.62b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=int, default=18 * 2**30, help="bytes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--skip", default="", help="of stock, fsdp2-offload")
    parser.add_argument("--folder")
    options = parser.parse_args()
    conf = f"vram:{options.budget},device:{options.device}"
    ours = main_job.train(options, conf, "host-optimizer")
    free = main_job.train(options, None, "host-optimizer")
    parameters, last = ours.built["parameters"], ours.steps[-1]
    host = last["ts_host_in_use_bytes_peak"]
    equal = ours.losses() == free.losses() and ours.weights == free.weights
    rows = [
        ("parameters", parameters, "count"),
        ("budget", options.budget, "bytes"),
        ("losses and weights bit-equal to the uncapped run", int(equal), "bool"),
        ("losses finite", int(all(math.isfinite(float.fromhex(x)) for x in ours.losses())), "bool"),
        ("host memory in use, peak", host, "bytes"),
        ("host memory a parameter", host / parameters, "bytes"),
        ("the same against the formula of 8 bytes", host / parameters / FORMULA_BYTES, "ratio"),
        (
            "optimizer states and weights against it",
            (last["ts_optimizer_bytes"] / parameters + 2) / FORMULA_BYTES,
            "ratio",
        ),
        ("optimizer's share of the work on the host", last.get("host_share", 0), "ratio"),
    ]
    report(rows, "trainstream, capped", ours)
    rows += main_job.per_step(ours) + main_job.after_second_step(ours)
    report(rows, "trainstream, uncapped", free)
    for kind in ("stock", "fsdp2-offload"):
        if kind in options.skip:
            continue
        rival = main_job.train(options, None, kind)
        report(rows, kind, rival)
        ratio = ours.median_seconds(2) / rival.median_seconds(2)
        rows.append((f"step against {kind}", ratio, "ratio"))
    for name, value, unit in rows:
        print(f"{name:56} {value:.6g} {unit}", flush=True)
    print(ours.exit_line.group(0) if ours.exit_line else "no exit line", file=sys.stderr)
    versions = {"torch": ours.built["torch"]}
    name = f"optimizer-job-{options.shape}"
    print(results.write(name, ours.built["hardware"], versions, rows, options.folder))
    within = last["reserved_peak_bytes"] <= options.budget
    return 0 if equal and within else 1


if __name__ == "__main__":
    sys.exit(main())
