"""Hugging Face's Trainer fine-tunes a 1.5 B model, under a budget and against itself without.

    python bench/trainer_job.py [--shape 1.5b] [--budget 0.4] [--steps 10] [--device cuda]

bench/trainer_worker.py is a plain script: Qwen2.5's 1.5 B shape in bfloat16, torch's fused AdamW,
gradient checkpointing, and clipping, as is Trainer's default. It runs stock and then with
PYTORCH_TRAINSTREAM=1; losses and final weights are compared bit for bit. With --device cpu the
device is simulated; a run that fits, in between, then tells stock's peak.

The exit status is 1 when bits differ, the budget was passed, or nothing had to leave.
"""

import argparse
import importlib.metadata
import os
import pathlib
import sys
import tempfile

import main_job
import results


def train(options, conf=None):
    command = [sys.executable, str(main_job.FOLDER / "trainer_worker.py")]
    command += ["--shape", options.shape, "--device", options.device]
    command += ["--steps", str(options.steps), "--length", str(options.length)]
    command += ["--sequences", str(options.sequences)]
    # Trainer would spread over all GPUs that it sees.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "steps.jsonl"
        main_job.run_to_end([*command, "--out", str(path)], conf, CUDA_VISIBLE_DEVICES=gpu)
        return main_job.Records.read_from(path)


def stock_peak(options, stock):
    """Bytes allocated at most, which stock PyTorch does not know on the simulated device."""
    if options.device == "cuda":
        return main_job.peak_of(stock, "allocated_peak_bytes")
    return main_job.peak_held(train(options, main_job.conf_of(options, main_job.ROOMY)))


def compare(options):
    """The stock run's records, rows and whether all was well."""
    stock = train(options)
    peak = stock_peak(options, stock)
    vram = int(options.budget * peak if options.budget <= 1 else options.budget)
    ours = train(options, main_job.conf_of(options, vram))
    rows, good = main_job.against_stock(stock, ours, peak, vram)
    evicted = main_job.peak_of(ours, "ts_evicted_bytes")
    rows.append(("evicted in all", evicted, "bytes"))
    return stock, rows, good and evicted > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1.5b", help="of bench/qwen2.py, such as tiny-tied")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=0.4, help="share of stock's peak, or bytes")
    parser.add_argument("--steps", type=int, default=10, help="more than 2, which are no measure")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--conf", default="", help="more of trainstream's settings")
    parser.add_argument("--name", help="of the result: bench/results/<date>-<name>.json")
    parser.add_argument("--folder")
    options = parser.parse_args()
    stock, rows, good = compare(options)
    for name, value, unit in rows:
        print(f"{name:40} {value:.6g} {unit}")
    if options.name:
        built = stock.built
        transformers = importlib.metadata.version("transformers")
        versions = {"torch": built["torch"], "transformers": transformers}
        print(results.write(options.name, built["hardware"], versions, rows, options.folder))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
