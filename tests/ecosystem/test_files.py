"""Files of weights, written while they are anywhere."""

import pytest
from matrix import ecosystem, run_cell
from real_runner import DEVICES

pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]


def test_safetensors_of_cold_shared_and_empty_tensors(tmp_path, device):
    """It reads bare addresses: of views, of tied weights, and of nothing."""
    pytest.importorskip("safetensors")
    script = """
from safetensors.torch import load, save, save_model
from torch import nn
torch.manual_seed(1)
if DEVICE == "cuda":
    WIDTH *= 2  # 16 MiB each. For less torch's allocator takes 20 MiB: more than the budget.
model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)]).to(DEVICE)
whole = torch.randn(64, WIDTH).to(DEVICE)
evict_all()
tensors = {"a": whole[:8].clone(), "none": torch.empty(0, WIDTH), "half": whole.bfloat16()}
evict_all()
raw = save({**tensors, **model.state_dict()})
show(hashlib.sha256(raw).hexdigest())
evict_all()
show([[k, v] for k, v in sorted(load(raw).items())])
model[3].weight = model[0].weight
evict_all()
path = os.path.join(os.path.dirname(__file__), "model.safetensors")
save_model(model, path)
with open(path, "rb") as file:
    show(hashlib.sha256(file.read()).hexdigest())
"""
    run_cell(tmp_path, script, device=device)
