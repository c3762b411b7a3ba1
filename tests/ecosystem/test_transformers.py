"""Hugging Face's Trainer, alone and with peft, and models saved and loaded by their own formats."""

import pytest
from matrix import ecosystem, long_form, run_cell
from real_runner import DEVICES

for library in ("transformers", "accelerate", "peft"):
    pytest.importorskip(library)
pytestmark = [*ecosystem, pytest.mark.parametrize("device", DEVICES)]

PRELOAD = (
    "torch._dynamo",
    "transformers.trainer",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "peft",
)

TRAINER = """
import tempfile
from transformers import (
    GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM,
    Trainer, TrainingArguments, set_seed)

SHAPE = dict(hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
MODELS = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=WIDTH, n_layer=3, n_head=4, vocab_size=512, n_positions=64)),
}
folder = tempfile.TemporaryDirectory()

def rows(count, seed):
    ids = torch.randint(0, 512, (count, 24), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]

def make_trainer(model, **options):
    options = {
        "max_steps": 60 if LONG else 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": DEVICE == "cpu", "seed": 5, **options}
    return Trainer(model, TrainingArguments(folder.name, **options),
                   train_dataset=rows(64, 1), eval_dataset=rows(8, 2))

def show_trained(trainer):
    for entry in trainer.state.log_history:
        show({k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k})
    show(trainer.model, trainer.optimizer.optimizer)
"""


def run(tmp_path, script, device, **options):
    return run_cell(tmp_path, TRAINER + script, device=device, preload=PRELOAD, **options)


@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2"])
def test_trainer_fine_tunes_a_whole_model(tmp_path, device, name):
    script = f"""
set_seed(5)
trainer = make_trainer(MODELS[{name!r}]())
trainer.train()
show_trained(trainer)
"""
    run(tmp_path, script, device)


def test_trainer_accumulates_clips_and_evaluates_in_between(tmp_path, device):
    script = """
set_seed(5)
trainer = make_trainer(
    MODELS["qwen2"](), gradient_accumulation_steps=3, max_grad_norm=0.1, eval_strategy="steps",
    eval_steps=2, warmup_steps=2, lr_scheduler_type="cosine", weight_decay=0.1)
trainer.train()
show_trained(trainer)
"""
    run(tmp_path, script, device)


def test_trainer_checkpoints_layers_in_bfloat16(tmp_path, device):
    script = """
set_seed(5)
trainer = make_trainer(MODELS["qwen2"](), gradient_checkpointing=True, bf16=True)
trainer.train()
show_trained(trainer)
"""
    run(tmp_path, script, device)


def test_trainer_resumes_from_a_checkpoint(tmp_path, device):
    script = """
set_seed(5)
trainer = make_trainer(MODELS["qwen2"](), save_strategy="steps", save_steps=4)
trainer.train()
show_trained(trainer)
set_seed(6)
again = make_trainer(MODELS["qwen2"]())
again.train(resume_from_checkpoint=f"{folder.name}/checkpoint-4")
show_trained(again)
names = zip(trainer.model.state_dict().items(), again.model.state_dict().items())
show(all(a.equal(b) and name == other for (name, a), (other, b) in names))
"""
    shown = run(tmp_path, script, device)
    assert shown.lines[-1] == "= True"


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_models_saved_and_loaded_are_the_same(tmp_path, device, name):
    """Their own files (safetensors, tied weights among them), and training goes on from there."""
    script = f"""
set_seed(5)
trainer = make_trainer(MODELS[{name!r}]())
trainer.train()
trainer.save_model(folder.name + "/saved")
first = trainer.model
second = type(first).from_pretrained(folder.name + "/saved").to(DEVICE)
show(first, second)
show(_shown(first) == _shown(second))
files = sorted(os.listdir(folder.name + "/saved"))
show([f for f in files if f.endswith("safetensors")])
with open(folder.name + "/saved/model.safetensors", "rb") as file:
    show(hashlib.sha256(file.read()).hexdigest())
trainer = make_trainer(second)
trainer.train()
show_trained(trainer)
second.save_pretrained(folder.name + "/again", max_shard_size="500KB")
third = type(first).from_pretrained(folder.name + "/again")
show(all(p.numel() and p.equal(q.cpu()) for p, q in
         zip(third.parameters(), second.parameters(), strict=True)))
"""
    shown = run(tmp_path, script, device)
    assert "= True" in shown.lines[1] and shown.lines[-1] == "= True"


def test_peft_trains_adapters_of_a_frozen_model(tmp_path, device):
    script = """
from peft import LoraConfig, PeftModel, get_peft_model
set_seed(5)
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1)
trainer = make_trainer(get_peft_model(MODELS["qwen2"](), lora), gradient_accumulation_steps=2)
trainer.train()
show_trained(trainer)
trainer.model.save_pretrained(folder.name + "/adapter")
set_seed(5)
again = PeftModel.from_pretrained(MODELS["qwen2"](), folder.name + "/adapter").to(DEVICE).eval()
x = torch.arange(24).reshape(1, 24).to(DEVICE)
with torch.no_grad():
    show(trainer.model.eval()(input_ids=x).logits, again(input_ids=x).logits)
    merged = again.merge_and_unload()
    show(merged(input_ids=x).logits, merged)
"""
    run(tmp_path, script, device)


def test_preferences_are_trained_against_a_frozen_reference(tmp_path, device):
    """As TRL's DPO does: two forward passes of the reference under no_grad, two of the policy."""
    script = """
import copy
import torch.nn.functional as F
set_seed(5)
policy = MODELS["qwen2"]().to(DEVICE)
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)

def log_probability(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

for step in range(40 if LONG else 8):
    chosen, rejected = (
        torch.stack([row["input_ids"] for row in rows(4, seed)]).to(DEVICE)
        for seed in (2 * step, 2 * step + 1))
    with torch.no_grad():
        before = log_probability(reference, chosen) - log_probability(reference, rejected)
    ahead = log_probability(policy, chosen) - log_probability(policy, rejected)
    loss = -F.logsigmoid(0.1 * (ahead - before)).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    show(loss.item(), norm.item())
show(policy, reference, optimizer)
"""
    run(tmp_path, script, device)


def test_text_is_generated_with_a_cache_between_steps(tmp_path, device):
    """Greedily, by beams, and by sampling; then training goes on."""
    script = """
set_seed(5)
trainer = make_trainer(MODELS["llama"](), max_steps=3)
trainer.train()
model = trainer.model.eval()
ids = torch.arange(24).reshape(2, 12).to(DEVICE)
for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}):
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), pad_token_id=0,
                             max_new_tokens=8, **options)
    show(out.tolist())
model.train()
trainer = make_trainer(model, max_steps=3)
trainer.train()
show_trained(trainer)
"""
    run(tmp_path, script, device)


@long_form
@pytest.mark.parametrize("optimizer", ["adafactor", "sgd", "adamw_torch"])
def test_trainer_with_other_optimizers(tmp_path, device, optimizer):
    script = f"""
set_seed(5)
trainer = make_trainer(MODELS["qwen2"](), optim={optimizer!r})
trainer.train()
show_trained(trainer)
"""
    run(tmp_path, script, device)
