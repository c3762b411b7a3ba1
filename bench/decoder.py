"""A decoder of Qwen2's shape in plain PyTorch. No checkpointing: activations are its memory."""

import torch
from torch import nn
from torch.nn import functional

# hidden size, layers, intermediate size, heads, heads of keys and values, vocabulary
SHAPES = {
    "tiny": (128, 4, 352, 4, 2, 2048),
    "1.26b": (2048, 24, 5632, 16, 8, 32000),
    "7.62b": (3584, 28, 18944, 28, 4, 152064),
}


class Layer(nn.Module):
    def __init__(self, hidden, inner, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.size)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, rotary):
        batch, length, hidden = x.shape
        split = (self.heads, self.kv_heads, self.kv_heads)
        heads = self.qkv(self.before(x)).view(batch, length, sum(split), self.size)
        q, k, v = heads.transpose(1, 2).split(split, dim=1)
        attended = functional.scaled_dot_product_attention(
            rotate(q, rotary), rotate(k, rotary), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        inner = self.between(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


def rotate(heads, rotary):
    cosine, sine = rotary
    low, high = heads.chunk(2, dim=-1)
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), dim=-1)


class Decoder(nn.Module):
    def __init__(self, shape):
        super().__init__()
        hidden, layers, inner, heads, kv_heads, vocabulary = SHAPES[shape]
        self.size = hidden // heads
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner, heads, kv_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        steps = torch.arange(0, self.size, 2, device=ids.device) / self.size
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] / 1e6**steps
        rotary = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, rotary)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
