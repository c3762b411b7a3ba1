"""Step time of the hybrid and stream engines for each way to cut and launch them.

    python bench/tune_optimizer.py [--parameters 240000000] [--folder bench/results]

Every choice gives the same bits, so one optimizer takes all of them in turn. The defaults in
csrc/optim/update_cuda.h and update_pipeline.h come from this.
"""

import argparse

import optimizer_engines
import results
import torch

import trainstream.optim
from trainstream.optim.adamw import _extension

KERNELS = [(False, 16), (False, 32), (False, 64), (True, 8), (True, 16), (True, 32)]
PIPELINES = [
    (1 << 20, 3, 3),
    (2 << 20, 3, 3),
    (2 << 20, 3, 2),
    (2 << 20, 6, 3),
    (4 << 20, 3, 2),
    (8 << 20, 3, 2),
]


def time(engine, optimizer, steps):
    """Nanoseconds a parameter."""
    optimizer._settings["engine"] = engine
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return optimizer_engines.median_steps([optimizer], steps)[0] / count * 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=240_000_000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    rows, tune = optimizer_engines.Rows(), _extension().tune_cuda_step
    for moments in ("float32", "bfloat16"):
        params = optimizer_engines.make("cuda", torch.bfloat16, options.parameters)
        optimizer = trainstream.optim.AdamW(params, engine="hybrid", moments=moments)
        rows.add(f"{moments}, host", time("host", optimizer, options.steps), "ns/param")
        for bulk, blocks in KERNELS:
            name = f"{moments}, {'bulk' if bulk else 'direct'} {blocks} blocks"
            tune(bulk, blocks, 2 << 20, 3, 3)
            rows.add(f"{name}, stream", time("stream", optimizer, options.steps), "ns/param")
            for chunk, slots, ahead in PIPELINES:
                tune(bulk, blocks, chunk, slots, ahead)
                value = time("hybrid", optimizer, options.steps)
                share = optimizer.share[0] / sum(optimizer.share)
                cut = f"chunk {chunk >> 20} Mi, {slots} slots, {ahead} ahead"
                rows.add(f"{name}, {cut}, host share {share:.2f}", value, "ns/param")
        del params, optimizer
    if options.folder:
        versions = {"torch": torch.__version__}
        hardware = torch.cuda.get_device_name()
        print(results.write("optimizer-tuning", hardware, versions, rows, options.folder))


if __name__ == "__main__":
    main()
