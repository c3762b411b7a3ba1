"""Under autocast no cast copy of a paged weight outlives its block.

Autocast keeps the copies of weights that it makes until its region ends, and autograd keeps them
for backward: a paged fp32 block would stay on the device as its own bf16 copy. So the cache is
emptied when a paged block ends, and what autograd would save of a cast weight is the weight itself,
which backward casts again, to the same bits.

The hooks are plain functions without state, so that models with them are copied and pickled.
"""

import threading

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainstream import errors

# Views that operators make of a weight before they save it.
_VIEWS = {
    "AsStridedBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "TBackward0",
    "TransposeBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}

_local = threading.local()  # .entered: of this thread, (module, hooks or None), the innermost last.


def watch(module: nn.Module) -> list:
    """Registers the hooks of a paged block; returns their handles."""
    return [
        module.register_forward_pre_hook(enter_block),
        module.register_forward_hook(leave_block, always_call=True),
    ]


def enter_block(module: nn.Module, args) -> None:
    """Before a paged block's forward."""
    if torch.compiler.is_compiling():
        return  # The compiler plans itself what is kept.
    hooks = _saving_weights(module) if torch.is_grad_enabled() and _casts(module) else None
    if hooks is not None:
        hooks.__enter__()
    _entered().append((module, hooks))


def leave_block(module: nn.Module, args, output) -> None:
    """After it, whether it raised or not."""
    if torch.compiler.is_compiling():
        return
    entered = _entered()
    if not entered or entered[-1][0] is not module:
        return  # An earlier hook raised, and this block was never entered.
    hooks = entered.pop()[1]
    if hooks is not None:
        hooks.__exit__()
    if _casts(module):
        torch.clear_autocast_cache()


def _entered() -> list:
    if not hasattr(_local, "entered"):
        _local.entered = []
    return _local.entered


def _casts(module: nn.Module) -> bool:
    param = next(module.parameters(), None)
    return param is not None and torch.is_autocast_enabled(param.device.type)


def _saving_weights(module: nn.Module) -> saved_tensors_hooks | None:
    """Hooks that save weights in place of their casts, and leave all else to the hooks around."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if outer is not None and outer[0].__module__ == "torch.utils.checkpoint":
        return None  # Saves nothing itself, and counts what it is given, forward and again.
    pack_outer, unpack_outer = outer or (None, None)
    params = set(module.parameters())

    def pack(tensor: torch.Tensor):
        weight = _source(tensor, params)
        if weight is not None:
            return _Cast(weight, tensor)
        return tensor if pack_outer is None else (pack_outer(tensor),)

    def unpack(saved):
        if isinstance(saved, _Cast):
            return saved.again()
        return saved if unpack_outer is None else unpack_outer(*saved)

    return saved_tensors_hooks(pack, unpack)


def _source(tensor: torch.Tensor, params: set) -> torch.Tensor | None:
    """The weight that `tensor` is a cast of, or a view of a cast; else None."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    copy = tensor._base if tensor._is_view() else tensor
    fits = weight is not None and weight in params and copy.grad_fn is not None
    same = fits and copy.shape == weight.shape and copy.grad_fn.name() == "ToCopyBackward0"
    return weight if same and copy.device == weight.device else None


class _Cast:
    """A weight, and how to make of it what was to be saved."""

    def __init__(self, weight: torch.Tensor, tensor: torch.Tensor):
        self._weight, self._version = weight, weight._version
        self._dtype = tensor.dtype
        self._place = tensor.size(), tensor.stride(), tensor.storage_offset()

    def again(self) -> torch.Tensor:
        if self._weight._version != self._version:
            raise errors.weight_changed_before_backward(tuple(self._weight.shape))
        return self._weight.detach().to(self._dtype).as_strided(*self._place)
