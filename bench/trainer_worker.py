"""Fine-tunes a Qwen2-shaped model with Hugging Face's Trainer, a line of JSON for each step.

    python trainer_worker.py --shape 1.5b --out steps.jsonl (bench/trainer_job.py calls it)

Knows nothing of trainstream but its counters, as bench/train_worker.py does.
"""

import json
import tempfile
import time

import qwen2
import torch
import train_worker
import transformers


class RecordingTrainer(transformers.Trainer):
    """Keeps the last loss as it is; what Trainer logs is rounded."""

    def training_step(self, *arguments, **options):
        self.last_loss = super().training_step(*arguments, **options)
        return self.last_loss


class StepRecorder(transformers.TrainerCallback):
    """Writes each step as it ends; its time is that since the last one ended, data included."""

    def __init__(self, device, write):
        self.device, self.write, self.trainer = device, write, None

    def on_train_begin(self, *arguments, **options):
        train_worker.wait_for(self.device)
        self.began = time.perf_counter()

    def on_step_end(self, *arguments, **options):
        train_worker.wait_for(self.device)
        now = time.perf_counter()
        self.write(
            event="step",
            seconds=now - self.began,
            loss=self.trainer.last_loss.item().hex(),
            **train_worker.counters(self.device),
        )
        self.began = time.perf_counter()


def options_given():
    parser = train_worker.parser_for(__doc__.splitlines()[0])
    parser.set_defaults(shape="1.5b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", required=True, help="file for the lines")
    return parser.parse_args()


def arguments_of(options, folder):
    return transformers.TrainingArguments(
        folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.sequences,
        learning_rate=1e-5,
        optim="adamw_torch_fused",
        gradient_checkpointing=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
        use_cpu=options.device == "cpu",
    )


def rows_of_tokens(options):
    generator = torch.Generator().manual_seed(1)
    size = options.sequences * options.steps, options.length
    ids = torch.randint(0, qwen2.SHAPES[options.shape]["vocab_size"], size, generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(options, write):
    start = time.perf_counter()
    model = qwen2.make(options.shape)
    recorder = StepRecorder(options.device, write)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RecordingTrainer(
            model,
            arguments_of(options, folder),
            train_dataset=rows_of_tokens(options),
            callbacks=[recorder],
        )
        recorder.trainer = trainer
        train_worker.wait_for(options.device)
        write(**train_worker.built_event(model, options.device, time.perf_counter() - start))
        trainer.train()
    write(**train_worker.digest(trainer))


def main():
    options = options_given()
    torch.use_deterministic_algorithms(True)
    if options.device == "cpu":
        torch.set_num_threads(2)
    with open(options.out, "w", encoding="utf-8") as file:

        def write(**fields):
            file.write(json.dumps(fields) + "\n")
            file.flush()

        train(options, write)


if __name__ == "__main__":
    main()
