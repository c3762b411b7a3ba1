"""Where a step's time goes: forward, backward and optimizer, and what moved meanwhile.

    PYTORCH_TRAINSTREAM=1 PYTORCH_TRAINSTREAM_CONF=vram:18GiB \
        python bench/step_phases.py --shape 7.62b --kind stock --steps 6 [--name phases-7.62b]

Nothing waits between the phases: events on the device tell when each ended there.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import qwen2
import results
import torch

MOVED = ("evicted", "restored", "dropped", "in_place", "born_cold", "loaded_ahead", "demanded")
LEVELS = ("arena", "extra", "beside", "planned")
COUNTS = ("plans", "strays", "extra_opened", "extra_gave_way", "refusals", "page_locks")


def counters():
    extension = sys.modules.get("trainstream._C")
    return {} if extension is None else dict(extension.stats())


PHASES = ("forward", "backward", "optimizer")


def run_step(trainer):
    """Seconds of forward, backward and optimizer on the device, of all; of the same in the program,
    which runs ahead; and the loss."""
    torch.cuda.synchronize()
    times, events = [], []

    def mark():
        times.append(time.perf_counter())
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    mark()
    vocabulary = trainer.model.config.vocab_size
    ids = torch.randint(0, vocabulary, trainer.size, generator=trainer.generator).to("cuda")
    loss = trainer.model(input_ids=ids, labels=ids).loss
    mark()
    loss.backward()
    mark()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=True)
    mark()
    torch.cuda.synchronize()
    whole = time.perf_counter() - times[0]
    pairs = [*zip(events, events[1:], strict=False)]
    on_device = [before.elapsed_time(after) / 1e3 for before, after in pairs]
    program = [after - before for before, after in zip(times, times[1:], strict=False)]
    return (*on_device, whole), program, loss.item()


def describe(last, now):
    if not now:
        return ""
    moved = [
        f"{key} {(now[f'{key}_bytes'] - last.get(f'{key}_bytes', 0)) / 1e9:.2f}" for key in MOVED
    ]
    levels = [f"{key} {now[f'{key}_bytes'] / 1e9:.2f}" for key in LEVELS]
    counts = [f"{key} {now[key]}" for key in COUNTS]
    return "    GB: " + ", ".join(moved + levels) + "; " + ", ".join(counts)


def report_rows():
    """What trainstream.report() says of a step, which is printed too; empty while it is off."""
    import trainstream

    report = trainstream.report(as_dict=True)
    if "step_seconds" not in report:
        return []
    print(trainstream.report())
    seconds = {
        "step on the device": report["step_seconds"],
        "predicted": report["predicted_seconds"],
        "bound": report["bound_seconds"],
        **{f"bound: {key}": value for key, value in (report["bound"] or {}).items()},
        **{f"waited: {key}": value for key, value in report["stall_seconds"].items()},
    }
    return [(name, value, "s") for name, value in seconds.items() if value is not None]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=qwen2.SHAPES, default="1.26b")
    parser.add_argument("--kind", default="stock", help="see rivals.KINDS")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--name", help="of the result")
    parser.add_argument("--folder")
    parser.add_argument("--record", help="file for the step that the plan was made from (JSON)")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    trainer = qwen2.Trainer(options.shape, "cuda", 4, 2048, kind=options.kind)
    last, steps, ahead = counters(), [], []
    for step in range(options.steps):
        seconds, program, loss = run_step(trainer)
        steps.append(seconds)
        ahead.append(program)
        words = "forward {:.3f} backward {:.3f} optimizer {:.3f} all {:.3f} s".format(*seconds)
        words += "; program {:.3f} {:.3f} {:.3f}".format(*program)
        print(f"{step} {words}, loss {loss.hex()}", flush=True)
        now = counters()
        print(describe(last, now), flush=True)
        last = now
    if options.record:
        extension = sys.modules["trainstream._C"]
        with open(options.record, "w", encoding="utf-8") as file:
            json.dump(extension.recorded_steps(), file)
    rows = [("step, median after 3", statistics.median(s[3] for s in steps[3:]), "s")]
    for i, phase in enumerate(PHASES):
        rows.append((f"{phase}, on the device", statistics.median(s[i] for s in steps[3:]), "s"))
        rows.append((f"{phase}, program", statistics.median(s[i] for s in ahead[3:]), "s"))
    share = getattr(trainer.optimizer, "share", None)
    if share:
        rows.append(("updates on the host", share[0] / max(1, sum(share)), "ratio"))
    rows.append(("last loss", loss, "nats"))
    rows.append(("reserved, peak", torch.cuda.max_memory_reserved(), "bytes"))
    rows += [(key, now[key], "count") for key in (*COUNTS, "steps") if now]
    rows += report_rows() if now else []
    for name, value, unit in rows:
        print(f"{name:40} {value:.6g} {unit}")
    if options.name:
        hardware = torch.cuda.get_device_name()
        conf = os.environ.get("PYTORCH_TRAINSTREAM_CONF", "off")
        versions = {"torch": torch.__version__, "PYTORCH_TRAINSTREAM_CONF": conf}
        print(results.write(options.name, hardware, versions, rows, options.folder))


if __name__ == "__main__":
    main()
