"""One rank of bench/distributed_job.py: trains, and leaves a line of JSON for each step in a file.

    torchrun --standalone --nproc-per-node 2 bench/distributed_worker.py \
        --kind fsdp2 --device cpu --length 64 --folder .

Knows nothing of trainstream but its counters, as bench/train_worker.py does. Every rank draws
tokens, and with --random-lengths lengths, of its own; only the model begins the same on all.
"""

import json
import os
import pathlib

import torch
import torch.distributed as dist
import train_worker


def main():
    parser = train_worker.parser_for(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--random-lengths", action="store_true", help="from an eighth of --length to all"
    )
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="for rank<N>.jsonl")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.use_deterministic_algorithms(True)
    with open(options.folder / f"rank{rank}.jsonl", "w", encoding="utf-8") as file:
        for fields in train(options, rank):
            file.write(json.dumps(fields) + "\n")
            file.flush()
    dist.destroy_process_group()


def train(options, rank):
    """What there is to say, as it comes."""
    trainer, built = train_worker.build(options, seed=1 + rank)
    yield built
    lengths = torch.Generator().manual_seed(1000 + rank)
    for _ in range(options.steps):
        length = options.length
        if options.random_lengths:
            shortest = max(2, length // 8)  # One token alone has no next one to predict.
            length = int(torch.randint(shortest, length + 1, (1,), generator=lengths))
        trainer.size = options.sequences, length
        yield {**train_worker.step(trainer), "tokens": options.sequences * length}
    yield train_worker.digest(trainer)


if __name__ == "__main__":
    main()
