"""The options of `trainstream.wrap()`: checked before anything is moved or changed."""

import numbers
from dataclasses import dataclass

import torch
from torch import nn

from trainstream import errors

_MOMENTS = ("auto", "float32", "bfloat16")
_SHARES = "auto, True, False, a share from 0 to 1, or indices of blocks"


@dataclass(frozen=True)
class Options:
    """As `trainstream.wrap` documents them."""

    device: object
    vram: object
    ram: object
    offload: object
    param_offload: object
    activation_offload: object
    moment_dtype: str
    check_memory: bool
    distributed: object
    max_grad_norm: float | None
    accumulation_steps: int | None
    prefetch_depth: int
    blocks: object

    def check(self) -> None:
        """Raises ValueError for what no model and no machine could make right."""
        _check_choice("offload", self.offload, ("auto", True, False))
        _check_choice("distributed", self.distributed, ("auto", True, False))
        _check_choice("moment_dtype", self.moment_dtype, _MOMENTS)
        _check_number("max_grad_norm", self.max_grad_norm, whole=False)
        _check_number("accumulation_steps", self.accumulation_steps, whole=True)
        depth = self.prefetch_depth
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
            raise errors.bad_argument("prefetch_depth", depth, "0, 1, 2, ...")
        share = self.activation_offload
        if share not in ("auto", True, False) and not _is_share(share):
            raise errors.bad_argument(
                "activation_offload", share, "auto, True, False, a share from 0 to 1"
            )
        if self.offload is False:
            if self.moment_dtype != "auto":
                raise errors.needs_host_optimizer(f"moment_dtype={self.moment_dtype!r}")
            if self.accumulation_steps is not None:
                raise errors.needs_host_optimizer("accumulation_steps")

    def paged_blocks(self, count: int) -> list[int] | None:
        """The blocks of `count` that the caller wants paged; None: measured headroom decides.

        Raises:
            ValueError: `param_offload` is none of what is allowed.
        """
        wanted = self.param_offload
        if isinstance(wanted, str):
            _check_choice("param_offload", wanted, ("auto",))
            return None
        if isinstance(wanted, bool) or _is_share(wanted):
            from trainstream import MemoryPlanner

            return MemoryPlanner.spread(round(float(wanted) * count), range(count))
        try:
            indices = sorted(wanted)
        except TypeError:
            raise errors.bad_argument("param_offload", wanted, _SHARES) from None
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
                allowed = f"indices of blocks, 0 to {count - 1}"
                raise errors.bad_argument("param_offload", index, allowed)
        return sorted(set(indices))

    def switch_keys(self) -> dict[str, object]:
        """What trainstream.enable() is to be asked for; only what was given."""
        keys = {"device": device_key(self.device), "vram": self.vram, "ram": self.ram}
        return {key: value for key, value in keys.items() if value not in (None, "auto")}


def device_key(device: object) -> str:
    """ "auto", "cuda" or "sim"."""
    text = str(device)
    if text.partition(":")[0] not in ("auto", "cuda", "sim"):
        raise errors.bad_argument("device", text, "auto, cuda, cuda:0, ..., sim")
    return text.partition(":")[0]


def torch_device(device: object, switched_on: str) -> torch.device:
    """Where tensors are to be. The simulated device's are on the CPU."""
    if switched_on == "sim":
        return torch.device("cpu")
    text = str(device)
    index = torch.device(text).index if text.startswith("cuda") else None
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def check_objects(model: object, optimizer: object) -> None:
    """Raises TypeError for what is no model or no optimizer."""
    if not isinstance(model, nn.Module):
        raise errors.not_a_module("wrap", model)
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise errors.not_an_optimizer(optimizer)


def _is_share(value: object) -> bool:
    """Integers are no shares: 1 might be meant as an index."""
    is_real = isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)
    return is_real and 0 <= value <= 1


def _check_choice(name: str, value: object, allowed: tuple) -> None:
    # By type too: 1 is not True here.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise errors.bad_argument(name, value, ", ".join(map(str, allowed)))


def _check_number(name: str, value: object, whole: bool) -> None:
    if value is None:
        return
    kind = numbers.Integral if whole else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
        allowed = "None or 1, 2, ..." if whole else "None or a number above 0"
        raise errors.bad_argument(name, value, allowed)
