"""The shape of a decoder from its Hugging Face `config.json`: parameters counted, no weights read.

Knows the files' keys and nothing of torch or transformers, so that a model is sized anywhere.
"""

import json
import math
import os
import pathlib
from dataclasses import dataclass

from trainstream import errors


@dataclass(frozen=True)
class _Family:
    """What a model type's configuration leaves unsaid.

    Args:
        gated: Its MLP has three matrices and not two.
        qkv_bias, out_bias, mlp_bias: Linear layers that have one.
        norm_vectors: Vectors of a norm: 1 (RMS) or 2 (with a bias).
        norms: Norms of a layer.
        qk_norm: Queries and keys have norms of their own: "head" (of a head's size), "all", "".
        positions: Rows of learned positions beside max_position_embeddings; None: it learns none.
        tied: Whether the output head is the embedding, where the file does not say.
        head_bias: The output head has one.
    """

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_vectors: int = 1
    norms: int = 2
    qk_norm: str = ""
    positions: int | None = None
    tied: bool = False
    head_bias: bool = False


_PLAIN = {"gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm_vectors": 2}
_FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "phi3", "granite", "smollm3"), _Family()),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm="head"),
    "qwen3_moe": _Family(qk_norm="head"),
    "olmo2": _Family(qk_norm="all"),
    "gemma": _Family(tied=True),
    "gemma2": _Family(tied=True, norms=4),
    "gemma3_text": _Family(tied=True, norms=4, qk_norm="head"),
    "starcoder2": _Family(**_PLAIN, tied=True),
    "gpt2": _Family(**_PLAIN, positions=0, tied=True),
    "opt": _Family(**_PLAIN, positions=2, tied=True),
    "gpt_neox": _Family(**_PLAIN),
    "phi": _Family(**_PLAIN, norms=1, head_bias=True),
}
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocabulary": ("vocab_size",),
}
_INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions")


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes. Parameters are counts, not bytes.

    Args:
        model_type: As the file names it.
        hidden, layers, vocabulary: As usual.
        attention: Width of all queries' heads together; `keys`: of all keys' heads.
        intermediate: Width of the MLP that one token goes through (several experts' together).
        layer_parameters: Of each layer.
        active_layer_parameters: Of a layer, those that one token meets: fewer with experts.
        embedding_parameters: Of the input side; `head_parameters`: of the output, 0 where tied.
        rest_parameters: The last norm.
        gated: Whether the MLP has three matrices.
        note: What was assumed; "" where nothing was.
    """

    model_type: str
    hidden: int
    layers: int
    vocabulary: int
    attention: int
    keys: int
    intermediate: int
    layer_parameters: tuple[int, ...]
    active_layer_parameters: int
    embedding_parameters: int
    head_parameters: int
    rest_parameters: int
    gated: bool
    note: str = ""

    @property
    def parameters(self) -> int:
        """All of them."""
        ends = self.embedding_parameters + self.head_parameters + self.rest_parameters
        return sum(self.layer_parameters) + ends


def load(model: str) -> Shape:
    """The shape of a config.json, of a folder with one, or of a model in Hugging Face's cache.

    Raises:
        TrainstreamError: There is none, or it is no configuration of a decoder.
    """
    path = _find(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise errors.cannot_read(str(path), fault.strerror or str(fault)) from None
    except ValueError as fault:
        raise errors.no_model_config(str(path), f"it is no JSON: {fault}") from None
    if not isinstance(config, dict):
        raise errors.no_model_config(str(path), "it is no JSON object")
    try:
        return shape_of(config)
    except (KeyError, TypeError, ValueError) as fault:
        raise errors.no_model_config(str(path), str(fault).strip("'\"")) from None


def _find(model: str) -> pathlib.Path:
    path = pathlib.Path(model)
    if path.is_dir():
        return path / "config.json"
    if path.exists() or model.endswith(".json"):
        return path
    kept = _in_cache(model)
    if kept is None:
        raise errors.no_model(model)
    return kept


def _in_cache(model: str) -> pathlib.Path | None:
    """What was downloaded under the name `owner/model`; asks no network."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = pathlib.Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    name = f"models--{model.replace('/', '--')}"
    found = sorted(hub.glob(f"{name}/snapshots/*/config.json")) if "*" not in name else []
    return found[-1] if found else None


def shape_of(config: dict) -> Shape:
    """The shape of a configuration.

    Raises:
        KeyError, TypeError, ValueError: It lacks a size or is none of a decoder; the text says so.
    """
    note = ""
    if "text_config" in config:
        config, note = {**config["text_config"]}, "the language part only is counted"
    model_type = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder") or "kv_lora_rank" in config:
        raise ValueError(f"models of type {model_type!r} are not counted here, only plain decoders")
    family = _FAMILIES.get(model_type)
    if family is None:
        family, note = _Family(), f"model type {model_type!r} is not known: counted as Llama's"
    return _count(config, family, model_type, note)


def _count(config: dict, family: _Family, model_type: str, note: str) -> Shape:
    hidden, layers, heads, vocabulary = (_size(config, *_NAMES[name]) for name in _NAMES)
    head_size = config.get("head_dim") or hidden // heads
    attention = heads * head_size
    keys = (config.get("num_key_value_heads") or heads) * head_size
    tied = bool(config.get("tie_word_embeddings", family.tied))
    sizes = (hidden, attention, keys)
    beside = _attention_parameters(config, family, *sizes, head_size)
    beside += family.norms * family.norm_vectors * hidden
    mlps = [_mlp_parameters(config, family, hidden, layer) for layer in range(layers)]
    embedding = vocabulary * hidden
    if family.positions is not None:
        embedding += (_size(config, *_POSITIONS) + family.positions) * hidden
    return Shape(
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        vocabulary=vocabulary,
        attention=attention,
        keys=keys,
        intermediate=max(width for _, _, width in mlps),
        layer_parameters=tuple(beside + every for every, _, _ in mlps),
        active_layer_parameters=beside + max(active for _, active, _ in mlps),
        embedding_parameters=embedding,
        head_parameters=0 if tied else vocabulary * (hidden + family.head_bias),
        rest_parameters=family.norm_vectors * hidden,
        gated=family.gated,
        note=note,
    )


def _size(config: dict, *names: str) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, not a number from 1 on")
            return value
    raise KeyError(f"it has no {' or '.join(names)}")


def _attention_parameters(
    config: dict, family: _Family, hidden: int, attention: int, keys: int, head_size: int
) -> int:
    said = config.get("attention_bias", config.get("use_bias"))
    qkv_bias, out_bias = (family.qkv_bias, family.out_bias) if said is None else (said, said)
    if family.qkv_bias and not family.out_bias:
        qkv_bias, out_bias = config.get("qkv_bias", True), False  # Qwen2.
    count = hidden * (attention + 2 * keys) + attention * hidden
    count += (attention + 2 * keys) * bool(qkv_bias) + hidden * bool(out_bias)
    norms = {"head": 2 * head_size, "all": attention + keys, "": 0}
    return count + norms[family.qk_norm]


def _mlp_parameters(config: dict, family: _Family, hidden: int, layer: int) -> tuple[int, int, int]:
    """(all, those one token meets, the width it goes through) of one layer's MLP or experts."""
    matrices = 3 if family.gated else 2
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    every = max(1, config.get("decoder_sparse_step") or 1)
    if experts and (layer + 1) % every == 0 and layer not in (config.get("mlp_only_layers") or []):
        width = config.get("moe_intermediate_size") or _size(config, *_INTERMEDIATE)
        chosen = config.get("num_experts_per_tok") or 2
        shared = config.get("shared_expert_intermediate_size") or 0
        router = hidden * experts + (hidden if shared else 0)
        one, beside = matrices * hidden * width, matrices * hidden * shared + router
        return experts * one + beside, chosen * one + beside, chosen * width + shared
    width = next((config[n] for n in _INTERMEDIATE if config.get(n)), None) or 4 * hidden
    said = config.get("mlp_bias", config.get("use_bias"))
    has_bias = family.mlp_bias if said is None else bool(said)
    bias = ((matrices - 1) * width + hidden) if has_bias else 0
    count = matrices * hidden * width + bias
    return count, count, width


def flops_of_step(shape: Shape, tokens: int, length: int, checkpointing: bool) -> float:
    """Floating-point operations of forward and backward, a multiplication and its sum being two.

    6 a parameter and token (2 forward, 4 backward) of every matrix that a token meets, and causal
    attention on top; a third more where each layer runs forward twice.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models".
    """
    matrices = shape.layers * shape.active_layer_parameters
    head = shape.vocabulary * shape.hidden
    attention = shape.layers * shape.attention * math.ceil(length / 2)
    layers = (6 * matrices + 12 * attention) * tokens
    return layers * (4 / 3 if checkpointing else 1) + 6 * head * tokens
