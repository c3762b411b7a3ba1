"""What `import torch` takes with the package installed and the variable unset, against without it.

    python bench/imports.py [--processes 1000] [--workers 2] [--folder bench/results]

Each worker starts one process after the other, with and without in turns: `python -c "import
torch"`. The package counts as installed where its folder, with its entry points, is on the path.
"""

import argparse
import concurrent.futures
import os
import pathlib
import statistics
import subprocess
import sys
import time

import results
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-c", "import torch"]
# Python looks for packages where it is started, and this clone is one.
ELSEWHERE = "/"
# Torch loads the entry points of this group when it is imported.
GROUP = "torch.backends"


def environment(installed):
    kept = {k: v for k, v in os.environ.items() if "TRAINSTREAM" not in k and k != "PYTHONPATH"}
    return {**kept, "PYTHONPATH": str(ROOT)} if installed else kept


def entry_points(installed):
    """Names in the group that such a process finds."""
    script = f"from importlib.metadata import entry_points as e\nprint(*e(group={GROUP!r}).names)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(installed),
        cwd=ELSEWHERE,
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def run(installed):
    """(seconds, whether it failed or said anything)."""
    start = time.perf_counter()
    done = subprocess.run(COMMAND, env=environment(installed), cwd=ELSEWHERE, capture_output=True)
    wrong = done.returncode != 0 or done.stdout or done.stderr
    return time.perf_counter() - start, bool(wrong)


def work(count):
    """As many of each kind, in turns, whichever is first."""
    taken = {True: [], False: []}
    for i in range(2 * count):
        installed = (i + i // 2) % 2 == 0
        taken[installed].append(run(installed))
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1000, help="of each kind")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder")
    options = parser.parse_args()
    found = entry_points(True), entry_points(False)
    if "trainstream" not in found[0] or "trainstream" in found[1]:
        raise SystemExit(f"entry points with and without the package: {found}")
    run(True), run(False)  # Files are in the page cache after these.
    share = options.processes // options.workers
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        parts = list(pool.map(work, [share] * options.workers))
    runs = {kind: [each for part in parts for each in part[kind]] for kind in (True, False)}
    medians = {kind: statistics.median(seconds for seconds, _ in runs[kind]) for kind in runs}
    wrong = sum(failed for _, failed in runs[True])
    rows = [
        ("processes with the package installed", len(runs[True]), "count"),
        ("of them failed or said something", wrong, "count"),
        ("import torch, installed: median", medians[True], "s"),
        ("import torch, not installed: median", medians[False], "s"),
        ("more at the median", (medians[True] - medians[False]) * 1e3, "ms"),
    ]
    for name, value, unit in rows:
        print(f"{name:40} {value:.6g} {unit}")
    if options.folder:
        versions = {"torch": torch.__version__}
        hardware = f"{os.cpu_count()} cores, no GPU"
        print(results.write("imports", hardware, versions, rows, options.folder))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
