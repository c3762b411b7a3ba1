"""The main job on one GPU: an unmodified script under a budget against the same script without.

    python bench/main_job.py [--shape 1.26b] [--budget 0.4] [--steps 20] [--kind stock] [--fit] \
        [--device cuda]

Two processes train the same model; one is stock, one has PYTORCH_TRAINSTREAM=1. By default they run
one after the other: losses and final weights are compared bit for bit, and the step time is given
against stock's. With --fit both live at once under a budget that fits and take turns: nothing may
move, and the ratio of the medians is what switching on costs. A second stock process takes its turn
too: its ratio to the first says how much of that is noise.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys

import results

ROOMY = 2**40  # Bytes; more than any run takes.
_STEPS_IN_A_TURN = 6
_CORES_OF_ALL = 4  # The program's thread, autograd's, and room for the driver's.
FOLDER = pathlib.Path(__file__).resolve().parent


class WorkerEnded(SystemExit):
    """A worker ended before its time; the argument is the reason."""


def environment_with(conf):
    """This process's, with trainstream switched on by `conf`; off where that is None."""
    environment = {k: v for k, v in os.environ.items() if "TRAINSTREAM" not in k}
    path = [str(FOLDER.parent), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
    if conf is not None:
        environment.update(PYTORCH_TRAINSTREAM="1", PYTORCH_TRAINSTREAM_CONF=conf)
    return environment


class Records:
    """What a process said of its training: as it was built, after each step, and at the end."""

    def __init__(self, built=None, steps=(), digest=None):
        self.built, self.steps, self.digest = built, list(steps), digest

    @classmethod
    def read_from(cls, path):
        """Of a file with a line of JSON for each."""
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
        built, *steps, digest = map(json.loads, lines)
        return cls(built, steps, digest)

    @property
    def weights(self):
        return self.digest["weights"]

    def median_seconds(self, skip):
        return statistics.median(step["seconds"] for step in self.steps[skip:])

    def losses(self):
        return [step["loss"] for step in self.steps]

    def is_finite(self):
        """A run whose losses are no numbers has the same bits as any other such run."""
        return all(math.isfinite(float.fromhex(loss)) for loss in self.losses())


def run_to_end(command, conf, **variables):
    """Runs a command that leaves its records in files; prints what trainstream says at its end."""
    environment = {**environment_with(conf), **variables}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise WorkerEnded(f"failed: a worker ended with status {done.returncode}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("trainstream:")]
    print(f"done: {conf or 'stock'}", *lines, sep="\n", file=sys.stderr, flush=True)


class Worker(Records):
    """bench/train_worker.py in a process of its own."""

    def __init__(self, options, conf=None, kind=None):
        command = [sys.executable, str(FOLDER / "train_worker.py"), "--shape", options.shape]
        command += ["--device", options.device, "--length", str(options.length)]
        command += ["--sequences", str(options.sequences), "--kind", kind or options.kind]
        self.process = subprocess.Popen(
            command,
            env=environment_with(conf),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if conf is not None else None,
            text=True,
        )
        super().__init__(built=self.read())

    def read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                fields = json.loads(line)
                if fields["event"] not in ("skipped", "failed"):
                    return fields
                self.process.stdin.close()
                raise WorkerEnded(f"{fields['event']}: {fields['reason']}")
        if self.process.stderr is not None:
            sys.stderr.write(self.process.stderr.read())
        raise WorkerEnded("failed: the process ended early")

    def step(self, times=1):
        """`times`: how many times as many sequences as usual."""
        self.process.stdin.write(f"step {times}\n")
        self.process.stdin.flush()
        self.steps.append(self.read())

    def turn(self, steps):
        """The seconds of so many steps one after the other."""
        for _ in range(steps):
            self.step()
        return [step["seconds"] for step in self.steps[-steps:]]

    def end(self):
        self.process.stdin.write("end\n")
        self.process.stdin.flush()
        self.digest = self.read()
        self.process.stdin.close()
        errors = self.process.stderr.read() if self.process.stderr is not None else ""
        if self.process.wait() != 0:
            raise SystemExit(f"a worker ended with status {self.process.returncode}\n{errors}")
        self.exit_line = re.search(r"^trainstream:.*evicted=.*$", errors, re.MULTILINE)
        return self


def train(options, conf=None, kind=None):
    worker = Worker(options, conf, kind)
    for _ in range(options.steps):
        worker.step()
    return worker.end()


def conf_of(options, vram):
    device = "cuda" if options.device == "cuda" else "sim"
    return f"vram:{int(vram)},device:{device}" + ("," + options.conf if options.conf else "")


def peak_of(worker, key):
    return worker.steps[-1].get(key, 0)


def peak_held(worker):
    """Bytes that count against the budget: what torch reserved, or the simulated device held."""
    return peak_of(worker, "reserved_peak_bytes") or peak_of(worker, "ts_peak_bytes")


def compare(options):
    """Stock, then under the budget. Returns rows and whether all bits were equal."""
    stock = train(options)
    peak = peak_of(stock, "allocated_peak_bytes") or int(options.stock_peak)
    vram = options.budget * peak if options.budget <= 1 else options.budget
    ours = train(options, conf_of(options, vram))
    print(ours.exit_line.group(0) if ours.exit_line else "no exit line", file=sys.stderr)
    return stock, *against_stock(stock, ours, peak, vram)


def against_stock(stock, ours, peak, vram):
    """Rows, and whether all bits were equal and the budget was kept. `peak`: stock's, allocated."""
    rows = [("budget", int(vram), "bytes"), ("stock peak allocated", peak, "bytes")]
    rows += [
        ("stock peak reserved", peak_of(stock, "reserved_peak_bytes"), "bytes"),
        ("budget share of stock peak", vram / peak, "ratio"),
        ("peak reserved", peak_held(ours), "bytes"),
        ("build and move", ours.built["seconds"], "s"),
        ("peak reserved after building", ours.built.get("reserved_peak_bytes", 0), "bytes"),
    ]
    same_losses = stock.losses() == ours.losses()
    rows += [
        ("losses bit-equal", int(same_losses), "bool"),
        ("steps compared", len(ours.steps), "steps"),
        ("final weights bit-equal", int(stock.weights == ours.weights), "bool"),
        ("first loss", float.fromhex(ours.losses()[0]), "nats"),
        ("last loss", float.fromhex(ours.losses()[-1]), "nats"),
    ]
    times = stock.median_seconds(2), ours.median_seconds(2)
    rows += [
        ("stock step, median after 2", times[0], "s"),
        ("step, median after 2", times[1], "s"),
        ("step against stock", times[1] / times[0], "ratio"),
        ("resident set peak", ours.steps[-1]["rss_bytes"], "bytes"),
    ]
    rows += foretold(ours, times[1]) + per_step(ours) + after_second_step(ours)
    within = peak_held(ours) <= vram
    rows.append(("peak reserved within budget", int(within), "bool"))
    return rows, same_losses and stock.weights == ours.weights and within and ours.is_finite()


def foretold(worker, median):
    """What the last plan foretold of a step, and the bound, against the median."""
    rows = []
    for key, name in (("predicted_seconds", "predicted"), ("bound_seconds", "bound")):
        if key in worker.digest:
            value = worker.digest[key]
            rows += [(name, value, "s"), (f"step against {name}", median / value, "ratio")]
    return rows


def per_step(worker):
    last, before = worker.steps[-1], worker.steps[-2]
    keys = ("evicted", "restored", "dropped", "in_place", "born_cold", "loaded_ahead", "demanded")
    return [
        (f"{key} in the last step", last[f"ts_{key}_bytes"] - before[f"ts_{key}_bytes"], "bytes")
        for key in keys
    ] + [
        ("moves refused", last["ts_failures"], "count"),
        ("arena", last["ts_arena_bytes"], "bytes"),
        ("extra frames, where there is room", last["ts_extra_bytes"], "bytes"),
        ("needed beside what is planned", last["ts_beside_bytes"], "bytes"),
        ("plans made", last["ts_plans"], "count"),
        ("page-locked at the end", last["ts_page_locked_bytes"], "bytes"),
        ("host memory in use, peak", last["ts_host_in_use_bytes_peak"], "bytes"),
    ]


def after_second_step(worker):
    """What still grew after the second step: all of it should be nothing."""
    second, last = worker.steps[1], worker.steps[-1]
    keys = {
        "host pool growths": "ts_growths",
        "page locks": "ts_page_locks",
        "driver allocations": "driver_allocations",
        "segments for small blocks": "small_segments",
        "driver frees": "driver_frees",
        "regions laid out": "ts_rebuilds",
    }
    for name, key in keys.items():
        counts = [step.get(key, 0) for step in worker.steps]
        grew = [i + 1 for i in range(2, len(counts)) if counts[i] > counts[i - 1]]
        if grew:
            print(f"{name} in steps {grew}", file=sys.stderr)
    return [
        (f"{name} after step 2", last.get(key, 0) - second.get(key, 0), "count")
        for name, key in keys.items()
    ]


@contextlib.contextmanager
def _on_cores(count):
    """Processes started meanwhile run on so many of this one's cores, the same for all."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-count:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@_on_cores(_CORES_OF_ALL)
def fit(options):
    """All at once under a budget that fits, taking turns of a few steps, in every order.

    The first step of a turn does not count: a process that waited wakes on a core that slept, and
    the forward pass, which the program paces, then takes 50 or 85 ms from one step to the next (an
    H200's host, 1.26 B parameters, with and without trainstream). All run on the same few cores:
    one process of three, stock or not, was 3 % slower than the others where each had its own.
    """
    stock, control = Worker(options), Worker(options)
    stock.step()
    control.step()
    vram = 1.5 * (peak_of(stock, "reserved_peak_bytes") or int(options.stock_peak))
    ours = Worker(options, conf_of(options, vram))
    ours.step()
    workers = [stock, ours, control]
    for worker in workers:
        worker.turn(_STEPS_IN_A_TURN)
    seconds = [[], [], []]
    orders = itertools.cycle(itertools.permutations(range(3)))
    while len(seconds[0]) < options.steps:
        for i in next(orders):
            seconds[i] += workers[i].turn(_STEPS_IN_A_TURN)[1:]
    for worker in workers:
        worker.end()
    times = [statistics.median(each) for each in seconds]
    last = ours.steps[-1]
    moved = sum(last[f"ts_{key}_bytes"] for key in ("evicted", "restored", "in_place", "born_cold"))
    equal = stock.losses() == ours.losses() and stock.weights == ours.weights
    rows = [
        ("fit: budget", int(vram), "bytes"),
        ("fit: stock step, median", times[0], "s"),
        ("fit: step, median", times[1], "s"),
        ("fit: second stock step, median", times[2], "s"),
        ("fit: step against stock", times[1] / times[0], "ratio"),
        ("fit: step against second stock", times[1] / times[2], "ratio"),
        ("fit: second stock against stock", times[2] / times[0], "ratio"),
        ("fit: steps", len(seconds[0]), "steps"),
        ("fit: bytes moved", moved, "bytes"),
        ("fit: bit-equal", int(equal), "bool"),
    ]
    return stock, rows, equal and moved == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.26b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=0.4, help="share of stock's peak, or bytes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kind", default="stock", help="see rivals.KINDS")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--conf", default="")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--stock-peak", default="0", help="bytes; for a device that cannot tell")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    options = parser.parse_args()
    worker, rows, good = (fit if options.fit else compare)(options)
    for name, value, unit in rows:
        print(f"{name:40} {value:.6g} {unit}")
    if options.name:
        versions = {"torch": worker.built["torch"]}
        path = results.write(options.name, worker.built["hardware"], versions, rows, options.folder)
        print(path)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
