"""More of torch: recurrent layers, functional transforms, other optimizers, tensor parallel."""

import pytest
from matrix import ecosystem, long_form, run_cell
from real_runner import DEVICES

pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]

TRAIN = """
from torch import nn
import torch.nn.functional as F
torch.manual_seed(6)
STEPS = 40 if LONG else 6

def rows(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step)).to(DEVICE)

def train(model, optimizer, loss_of):
    for step in range(STEPS):
        loss = loss_of(step)
        loss.backward()
        show(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    show(model, optimizer)
"""


def test_recurrent_layers(tmp_path, device):
    script = """
model = nn.ModuleDict({
    "lstm": nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2, bidirectional=True),
    "gru": nn.GRU(2 * WIDTH, WIDTH, batch_first=True)}).to(DEVICE)

def loss_of(step):
    x = rows(step, 6, 12, WIDTH)
    packed = nn.utils.rnn.pack_padded_sequence(x, [12, 11, 9, 5, 2, 1], batch_first=True)
    packed, _ = model["lstm"](packed)
    y, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    return (model["gru"](y)[0] - x).square().mean()

train(model, torch.optim.NAdam(model.parameters(), lr=1e-3), loss_of)
"""
    run_cell(tmp_path, TRAIN + script, device=device, share=0.5)


@long_form
def test_parametrizations_and_reentrant_checkpoints(tmp_path, device):
    script = """
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
layers = [wrap(nn.Linear(WIDTH, WIDTH)) for wrap in (spectral_norm, weight_norm, orthogonal) * 2]
model = nn.Sequential(*[m for layer in layers for m in (layer, nn.Dropout(0.1), nn.SiLU())])
model = model.to(DEVICE)

def loss_of(step):
    x = rows(step, 64, WIDTH).requires_grad_()
    x = checkpoint_sequential(model[:9], 3, x, use_reentrant=True)
    return checkpoint(model[9:], x, use_reentrant=False).square().mean()

train(model, torch.optim.Adamax(model.parameters(), lr=1e-3), loss_of)
"""
    run_cell(tmp_path, TRAIN + script, device=device, share=0.5)


def test_functional_transforms(tmp_path, device):
    """An ensemble by vmap, gradients for each sample, and a product with the Hessian."""
    script = """
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
models = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
          for _ in range(3)]
params, buffers = stack_module_state(models)
optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.9)

def loss_of(params, x):
    return (functional_call(models[0], params, (x,)) - x).square().mean()

for step in range(STEPS):
    x = rows(step, 16, WIDTH)
    losses = vmap(loss_of, (0, None))(params, x)
    losses.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    show(losses)
    first = {name: p[0].detach() for name, p in params.items()}
    show(vmap(grad(loss_of), (None, 0))(first, x[:6]))
    ones = {name: torch.ones_like(p) for name, p in first.items()}
    show(jvp(lambda p: grad(loss_of)(p, x), (first,), (ones,))[1])
show(params, optimizer)
"""
    run_cell(tmp_path, TRAIN + script, device=device)


@long_form
@pytest.mark.parametrize("name", ["Muon", "LBFGS", "Adafactor", "ASGD"])
def test_other_optimizers(tmp_path, device, name):
    script = f"""
model = nn.Sequential(*[m for _ in range(4) for m in (
    nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())]).to(DEVICE)
optimizer = torch.optim.{name}(model.parameters(), lr=1e-2)
for step in range(STEPS):
    x = rows(step, 16, WIDTH)

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        return loss

    show(optimizer.step(closure).item())
show(model, *[v for s in optimizer.state.values() for v in s.values()
              if isinstance(v, torch.Tensor)])
"""
    run_cell(tmp_path, TRAIN + script, device=device, share=0.5)


def test_scaled_losses_in_half_precision(tmp_path, device):
    script = """
model = nn.Sequential(*[m for _ in range(4) for m in (
    nn.Linear(WIDTH, WIDTH), nn.GELU())]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**14, growth_interval=2)
for step in range(STEPS):
    x = rows(step, 16, WIDTH) * (1e4 if step == 3 else 1)
    with torch.autocast(DEVICE, torch.float16):
        loss = model(x).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    show(loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    show(scaler.get_scale())
show(model, optimizer)
"""
    run_cell(tmp_path, TRAIN + script, device=device, share=0.5)
