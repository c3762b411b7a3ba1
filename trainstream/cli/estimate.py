"""What training a decoder takes: bytes on the device and on the host, bytes moved, the bound of a
step. Arithmetic only; what a budget allows is asked of trainstream.MemoryPlanner by fit.py.

Checked against one H200: a 7.62 B Qwen2 shape, 8192 tokens, checkpointing, all in bfloat16, has a
peak of 62.7 GB under stock PyTorch, a 1.26 B one 11.7 GB (tests/test_cli.py).
"""

from dataclasses import dataclass

from trainstream.cli.model_shape import Shape

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# A token's logits, a number each: in backward log-softmax, its gradient and that of the logits are
# there at once, in fp32. (Forward has 2 + 4 + 4: the logits, their fp32 copy, log-softmax.)
_LOGITS_BYTES = 12
# Gradients that wait for the next forward pass come to at most this part of the budget, as
# trainstream/_foreach.py has it.
_LATE_IN_BUDGET = 4
# Host memory that an update of one parameter by trainstream.optim reads and writes (README.md).
_HOST_UPDATE_BYTES = {"float32": 28, "bfloat16": 18}
# Of trainstream.optim, a parameter: weight and remainder (an fp32 master is the same), moments.
_HOST_STATE_BYTES = {"float32": 4 + 8, "bfloat16": 4 + 4}


@dataclass(frozen=True)
class Job:
    """What is trained.

    Args:
        shape: The model's.
        tokens: Of one step and one forward pass: batch times length.
        length: Of one sequence; attention's work depends on it.
        dtype: Of weights and gradients, and of stock's moments. Default "bfloat16".
        checkpointing: Only layers' inputs are kept for backward. Default True.
        optimizer: "stock" (torch's AdamW) or "host" (trainstream.optim.AdamW). Default "stock".
        moments: Of "host": "float32" or "bfloat16". Default "float32".
    """

    shape: Shape
    tokens: int
    length: int
    dtype: str = "bfloat16"
    checkpointing: bool = True
    optimizer: str = "stock"
    moments: str = "float32"


@dataclass(frozen=True)
class Need:
    """Bytes of a job.

    Args:
        weights, gradients, states: Of all parameters; `states` are 0 where the host has them.
        host_states: Always in host memory.
        kept: Activations kept for backward: layers' inputs, or everything without checkpointing.
        working: One layer's activations and gradients while it runs backward.
        logits: From logits to their gradient.
        peak: Most that is on the device at once without trainstream.
    """

    weights: int
    gradients: int
    states: int
    host_states: int
    kept: int
    working: int
    logits: int
    peak: int


@dataclass(frozen=True)
class Rates:
    """Bytes a second, as trainstream.HardwareProfile has them, and operations; 0: not known."""

    to_device: float = 0.0
    to_host: float = 0.0
    host_memory: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """Bytes a step: over the link each way, and in host memory (cores and copies)."""

    to_device: int
    to_host: int
    host_memory: int


@dataclass(frozen=True)
class Phase:
    """A part of a step.

    Args:
        computing: Its share of the step's operations.
        to_device, to_host: Bytes that cross the link meanwhile.
    """

    name: str
    computing: float
    to_device: int
    to_host: int


def need(job: Job) -> Need:
    """The bytes of a job. Fixed costs (context, libraries, fragments) are not in it."""
    shape, size = job.shape, DTYPE_BYTES[job.dtype]
    weights = gradients = shape.parameters * size
    stock = job.optimizer == "stock"
    states = 2 * weights if stock else 0
    host_states = 0 if stock else shape.parameters * _HOST_STATE_BYTES[job.moments]
    inputs = job.tokens * shape.hidden * size
    layer = layer_activations(job)
    # Its gradients: those of the MLP's two widest results, and of two of the layer's own width.
    working = layer + job.tokens * size * 2 * (shape.intermediate + shape.hidden)
    kept = shape.layers * (inputs if job.checkpointing else layer)
    logits = job.tokens * shape.vocabulary * _LOGITS_BYTES
    # At the end of backward all gradients are there but the first layer's and the embedding's.
    missing = (shape.layer_parameters[0] + shape.embedding_parameters) * size
    at_end = gradients + max(0, working - missing)
    peak = weights + states + max(kept + logits, at_end)
    return Need(weights, gradients, states, host_states, kept, working, logits, peak)


def layer_activations(job: Job) -> int:
    """Bytes that one layer keeps for backward without checkpointing.

    A token's, in numbers of the dtype: both norms (an fp32 copy of the input, the normalized and
    the scaled one), queries, attention's result and its like, keys and values, and four of the
    MLP's width (gate, its activation, up, their product), or two without a gate.
    """
    shape, size = job.shape, DTYPE_BYTES[job.dtype]
    norms = 2 * (4 + 2 * size) * shape.hidden
    attention = size * (2 * shape.attention + 4 * shape.keys + 2 * shape.hidden)
    mlp = size * (4 if shape.gated else 2) * shape.intermediate
    return job.tokens * (norms + attention + mlp)


def late_share(job: Job, device_bytes: int) -> float:
    """Of stock's updates, the part that is made in the next forward pass, before its weights are
    used: so many of their gradients may wait on the device."""
    return min(1.0, device_bytes / _LATE_IN_BUDGET / need(job).gradients)


def phases(job: Job, paged: dict[str, int], late: float) -> list[Phase]:
    """What a step does one after the other, where `paged` bytes of each kind wait in host memory.

    A weight comes in for forward, for backward and, unless its update is late, for the update,
    after which it goes back. Moments come and go with the update. A gradient goes out in backward
    and comes in for the update; kept activations go out in forward and come in for backward.

    Args:
        paged: Bytes of "weights", "gradients", "states" and "kept" that do not stay.
        late: As late_share(). The optimizer is stock's.
    """
    weights, gradients, kept = (paged[kind] for kind in ("weights", "gradients", "kept"))
    updated = paged["states"] + weights
    in_forward, rest = int(late * updated), int((1 - late) * updated)
    forward = 1 / 4 if job.checkpointing else 1 / 3
    come = weights + int(late * paged["states"])
    return [
        Phase("forward, with updates that waited", forward, come, in_forward + kept),
        Phase("backward", 1 - forward, weights + kept, gradients),
        Phase("the other updates", 0.0, rest + gradients, rest),
    ]


def foretell(steps: list[Phase], rates: Rates, flops: float) -> list[tuple[str, float]]:
    """(phase, seconds), each as long as the longest of computing and copying each way."""
    return [
        (
            phase.name,
            max(
                phase.computing * flops / rates.flops,
                phase.to_device / rates.to_device,
                phase.to_host / rates.to_host,
            ),
        )
        for phase in steps
    ]


def traffic(job: Job, paged: dict[str, int], late: float) -> Traffic:
    """Bytes a step where `paged` bytes of each kind wait in host memory.

    Args:
        paged, late: As phases() has them; trainstream.optim has no late updates of this kind.
    """
    if job.optimizer == "stock":
        steps = phases(job, paged, late)
        up, down = sum(step.to_device for step in steps), sum(step.to_host for step in steps)
        return Traffic(up, down, up + down)
    # Every gradient goes to the cores. What stays is written to the device, what does not is read.
    need_bytes = need(job)
    both = paged["states"] + paged["kept"]
    stays = need_bytes.weights - paged["weights"]
    up, down = 2 * paged["weights"] + stays + both, need_bytes.gradients + both
    update = job.shape.parameters * _HOST_UPDATE_BYTES[job.moments]
    return Traffic(up, down, up + down + update)


def terms(moved: Traffic, rates: Rates, flops: float) -> list[tuple[str, float, float, float]]:
    """(name, amount, rate, seconds) of what a step cannot be faster than; only those known."""
    every = [
        ("computing", flops, rates.flops),
        ("the link to the device", moved.to_device, rates.to_device),
        ("the link to the host", moved.to_host, rates.to_host),
        ("host memory", moved.host_memory, rates.host_memory),
    ]
    return [(name, amount, rate, amount / rate) for name, amount, rate in every if rate > 0]
