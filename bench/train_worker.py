"""Trains a Qwen2-shaped model, a step for each line on stdin; answers each with a line of JSON.

    echo -e "step\nstep 4\nend" | python bench/train_worker.py --shape 1.26b

Knows nothing of trainstream but its counters, read when it is switched on by the environment.
"""

import argparse
import json
import os
import resource
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import qwen2
import rivals
import torch


def counters(device):
    found = {"rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if device == "cuda":
        stats = torch.cuda.memory_stats()
        found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_peak_bytes"] = torch.cuda.max_memory_reserved()
        found["driver_allocations"] = stats["num_device_alloc"]
        found["driver_frees"] = stats["num_device_free"]
        found["small_segments"] = stats["segment.small_pool.current"]
        found["ooms"] = stats["num_ooms"]
        free, total = torch.cuda.mem_get_info()
        found["device_used_bytes"] = total - free  # Torch does not see managed memory.
    extension = sys.modules.get("trainstream._C")
    if extension is not None and hasattr(extension, "host_pool_stats"):
        pool = extension.host_pool_stats(torch.zeros(1, device=device))
        found.update({f"pool_{key}": value for key, value in pool.items()})
    if extension is not None:
        found.update({f"ts_{key}": value for key, value in extension.stats().items()})
    return found


def prediction():
    """What the plan foretold of a step and the bound it is held against; empty without a plan."""
    library = sys.modules.get("trainstream")
    report = library.report(as_dict=True) if library is not None else {}
    keys = ("predicted_seconds", "bound_seconds", "step_seconds")
    return {key: report[key] for key in keys if report.get(key) is not None}


def answer(**fields):
    print(json.dumps(fields), flush=True)


def parser_for(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=qwen2.SHAPES, default="tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kind", default="stock", choices=rivals.KINDS)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    return parser


def main():
    """Says why in a last line of JSON when it cannot run, or fails."""
    options = parser_for(__doc__.splitlines()[0]).parse_args()
    reason = rivals.KINDS[options.kind].missing()
    if reason is not None:
        answer(event="skipped", reason=reason)
        return
    try:
        train(options)
    except Exception as fault:
        lines = str(fault).strip().splitlines() or [""]
        answer(event="failed", reason=f"{type(fault).__name__}: {lines[0]}")
        raise


def train(options):
    torch.use_deterministic_algorithms(True)
    if options.device == "cpu":
        torch.set_num_threads(2)
    trainer, built = build(options)
    answer(**built)
    for line in sys.stdin:
        word, *times = line.split() or [""]
        if word != "step":
            break
        answer(**step(trainer, *map(int, times)))
    answer(**digest(trainer))


def wait_for(device):
    if device == "cuda":
        torch.cuda.synchronize()


def build(options, seed=1):
    """The trainer, and what is to say of it."""
    start = time.perf_counter()
    size = options.sequences, options.length
    trainer = qwen2.Trainer(options.shape, options.device, *size, kind=options.kind, seed=seed)
    wait_for(options.device)
    return trainer, built_event(trainer.model, options.device, time.perf_counter() - start)


def built_event(model, device, seconds):
    return {
        "event": "built",
        "seconds": seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch": torch.__version__,
        "hardware": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        **counters(device),
    }


def step(trainer, times=1):
    """On `times` as many sequences as usual."""
    start = time.perf_counter()
    loss = trainer.step(times)
    wait_for(trainer.device)
    seconds = time.perf_counter() - start
    share = getattr(trainer.optimizer, "share", (0, 0))
    return {
        "event": "step",
        "seconds": seconds,
        "loss": loss.item().hex(),
        "host_share": share[0] / max(1, sum(share)),
        **counters(trainer.device),
    }


def digest(trainer):
    foretold = prediction()
    start = time.perf_counter()
    weights = qwen2.digest(trainer.model)
    seconds = time.perf_counter() - start
    return {"event": "digest", "weights": weights, "seconds": seconds, **foretold}


if __name__ == "__main__":
    main()
