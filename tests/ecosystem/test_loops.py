"""Loops of other libraries: Accelerate's and Lightning's."""

import pytest
from matrix import ecosystem, run_cell
from real_runner import DEVICES

pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]

MODEL = """
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(3)

def make_model():
    block = lambda: nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(512, WIDTH), *[block() for _ in range(3)], nn.Linear(WIDTH, 512))

def make_loader(seed, count=64):
    ids = torch.randint(0, 512, (count, 16), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(ids), batch_size=4, shuffle=True,
                      generator=torch.Generator().manual_seed(seed))

def loss_of(model, ids):
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

EPOCHS = 8 if LONG else 1
"""


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerates_loop_accumulates_clips_and_schedules(tmp_path, device, precision):
    pytest.importorskip("accelerate")
    script = f"""
from accelerate import Accelerator
accelerator = Accelerator(
    cpu=DEVICE == "cpu", gradient_accumulation_steps=2, mixed_precision={precision!r})
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)
model, optimizer, loader, scheduler = accelerator.prepare(
    model, optimizer, make_loader(1), scheduler)
for epoch in range(EPOCHS):
    for (ids,) in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                show(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        show(loss.item())
show(accelerator.unwrap_model(model), optimizer, scheduler.get_last_lr())
"""
    run_cell(
        tmp_path, MODEL + script, device=device, preload=("torch._dynamo", "accelerate"), share=0.5
    )


def test_accelerate_saves_and_loads_its_state(tmp_path, device):
    pytest.importorskip("accelerate")
    script = """
import tempfile
from accelerate import Accelerator
accelerator = Accelerator(cpu=DEVICE == "cpu")
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(1))

def train(steps):
    for step, (ids,) in zip(range(steps), loader):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        show(loss.item())

train(4)
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    kept = _shown(model), _shown(optimizer.optimizer)
    train(4)
    accelerator.load_state(folder)
show(kept == (_shown(model), _shown(optimizer.optimizer)))
train(4)
show(model, optimizer)
"""
    shown = run_cell(
        tmp_path, MODEL + script, device=device, preload=("torch._dynamo", "accelerate"), share=0.5
    )
    assert "= True" in shown.lines


LIGHTNING = """
import logging, tempfile, warnings
import lightning
warnings.filterwarnings("ignore", category=UserWarning, module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
folder = tempfile.TemporaryDirectory()

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = make_model()

    def training_step(self, batch, index):
        loss = loss_of(self.model, batch[0])
        show(index, loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("validation", loss_of(self.model, batch[0]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

def make_trainer(**options):
    return lightning.Trainer(
        accelerator="cpu" if DEVICE == "cpu" else "gpu", devices=1, logger=False,
        default_root_dir=folder.name, enable_progress_bar=False, enable_model_summary=False,
        **{"max_epochs": EPOCHS, "enable_checkpointing": False, **options})
"""


def run_lightning(tmp_path, script, device):
    pytest.importorskip("lightning")
    text = MODEL + LIGHTNING + script
    return run_cell(tmp_path, text, device=device, preload=("torch._dynamo", "lightning"))


def test_lightning_optimizes_automatically(tmp_path, device):
    script = """
module = Module()
trainer = make_trainer(
    accumulate_grad_batches=2, gradient_clip_val=0.5, val_check_interval=0.5)
trainer.fit(module, make_loader(1), make_loader(2, 8))
show(trainer.callback_metrics["validation"].item(), module, trainer.optimizers[0])
"""
    run_lightning(tmp_path, script, device)


def test_lightning_optimizes_manually(tmp_path, device):
    """Two optimizers in turns, as adversarial training has them."""
    script = """
class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(512, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def training_step(self, batch, index):
        ours, judges = self.optimizers()
        fake = self.model(batch[0]).softmax(-1)
        self.toggle_optimizer(ours)
        loss = loss_of(self.model, batch[0]) - self.judge(fake).mean()
        self.manual_backward(loss)
        self.clip_gradients(ours, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        ours.step()
        ours.zero_grad()
        self.untoggle_optimizer(ours)
        real = nn.functional.one_hot(batch[0], 512).float()
        judged = self.judge(fake.detach()).mean() - self.judge(real).mean()
        self.manual_backward(judged)
        judges.step()
        judges.zero_grad()
        show(index, loss.item(), judged.item())

    def configure_optimizers(self):
        return (torch.optim.AdamW(self.model.parameters(), lr=1e-3),
                torch.optim.SGD(self.judge.parameters(), lr=0.1, momentum=0.9))

module = Manual()
trainer = make_trainer()
trainer.fit(module, make_loader(1))
show(module, *trainer.optimizers)
"""
    run_lightning(tmp_path, script, device)


def test_lightning_resumes_from_its_checkpoint(tmp_path, device):
    script = """
module = Module()
trainer = make_trainer(max_epochs=2, limit_train_batches=4)
trainer.fit(module, make_loader(1))
trainer.save_checkpoint(folder.name + "/last.ckpt")
kept = _shown(module)
torch.manual_seed(9)
again = Module()
trainer = make_trainer(max_epochs=3, limit_train_batches=4)
trainer.fit(again, make_loader(1), ckpt_path=folder.name + "/last.ckpt", weights_only=False)
show(kept, again, trainer.optimizers[0], trainer.global_step)
"""
    shown = run_lightning(tmp_path, script, device)
    assert shown.lines[-1].endswith(" 12")
