"""Qwen2-shaped models from Hugging Face, and one training step on them: plain PyTorch throughout.

Weights are filled with a repeated block of random numbers instead of the library's own
initialization: 7.62e9 numbers from one CPU thread take minutes, and what is measured is placement.
"""

import concurrent.futures
import hashlib

import rivals
import torch

try:
    from transformers import Qwen2Config, Qwen2ForCausalLM
except ImportError as fault:
    raise SystemExit("bench: Qwen2 shapes need transformers: pip install transformers") from fault

SHAPES = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 704,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 8192,
    },
    "1.26b": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "1.5b": {  # Qwen2.5-1.5B.
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "7.62b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "14b": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "intermediate_size": 13824,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
SHAPES["tiny-tied"] = {**SHAPES["tiny"], "tie_word_embeddings": True}


def make(shape, seed=0):
    """The model in bfloat16, on the CPU."""
    config = Qwen2Config(max_position_embeddings=4096, use_cache=False, **SHAPES[shape])
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    model.tie_weights()  # That gave each of the modules that share a weight one of its own.
    fill(model, seed)
    return model


def build(shape, device, seed=0, wrap=None):
    """The model, moved to `device`, checkpointing on.

    `wrap` may put something around it before it moves, and then moves it itself.
    """
    model = make(shape, seed)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model.to(device) if wrap is None else wrap(model, device)


@torch.no_grad()
def fill(model, seed):
    generator = torch.Generator().manual_seed(seed)
    block = torch.randn(1 << 22, generator=generator).mul_(0.02).to(torch.bfloat16)
    for name, param in model.named_parameters():
        if param.dim() == 1:
            param.fill_(1.0 if "norm" in name else 0.0)
            continue
        flat = param.view(-1)
        for begin in range(0, flat.numel(), block.numel()):
            piece = flat[begin : begin + block.numel()]
            piece.copy_(block[: piece.numel()])
    for module in model.modules():  # Rotary tables are buffers that `meta` left empty.
        if hasattr(module, "inv_freq"):
            fresh, _ = module.compute_default_rope_parameters(module.config)
            module.inv_freq.copy_(fresh)
            module.original_inv_freq = module.inv_freq.clone()


class Trainer:
    """One optimizer step on `sequences` x `length` random tokens, different ones each step."""

    def __init__(self, shape, device, sequences=4, length=2048, lr=1e-5, kind="stock", seed=1):
        """`kind`: one of rivals.KINDS. `seed`: of the tokens."""
        chosen = rivals.KINDS[kind]
        self.model = build(shape, device, wrap=chosen.wrap)
        self.engine = chosen.engine(self.model, lr, sequences) if chosen.engine else None
        self.optimizer = None if self.engine else chosen.optimizer(self.model, lr, device)
        self.vocabulary = SHAPES[shape]["vocab_size"]
        self.device, self.size = device, (sequences, length)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, times=1):
        """On `times` as many sequences as usual."""
        size = times * self.size[0], self.size[1]
        ids = torch.randint(0, self.vocabulary, size, generator=self.generator).to(self.device)
        loss = (self.engine or self.model)(input_ids=ids, labels=ids).loss
        if self.engine:
            self.engine.update(loss)
            return loss.detach()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def digest(model):
    """SHA-256 over the SHA-256 of each parameter's raw bytes, in order, then of each gradient's."""

    def of(param):
        # A copy of each in turn: a whole model of them would not fit beside what is paged.
        param = param.to_local() if hasattr(param, "to_local") else param
        return hashlib.sha256(param.detach().cpu().view(torch.uint8).numpy()).digest()

    gradients = [param.grad for param in model.parameters() if param.grad is not None]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        digests = pool.map(of, [*model.parameters(), *gradients])
        return hashlib.sha256(b"".join(digests)).hexdigest()
