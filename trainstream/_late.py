"""Fused optimizer steps made when their weights are next used.

Between a step and the next use of a weight, of its gradient or of its states nobody can tell
whether the update was made. Made all at once, its bytes pass over the link while the model waits;
made one by one before those uses, they pass while it computes. The extension makes them
(deferred_updates.h). What is here hands them over, and has them made where neither an operator nor
an address given out would tell: before a fork, before a compiled module is loaded, before C++ saves
what it is given, and once an optimizer goes away.
"""

import functools
import importlib.machinery
import os
import weakref
from collections.abc import Callable
from types import ModuleType

import torch
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from trainstream import _edges

# They write the tensors of their lists, each its own, but no counts of steps.
_FUSED = {
    getattr(torch, name)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
    if hasattr(torch, name)
}

# C++ that reads CPU tensors where they are: torch.package, torch.jit.save.
_SERIALIZERS = {
    "PyTorchFileWriter": ("write_record",),
    "ScriptModule": ("save", "save_to_buffer"),
    "ScriptFunction": ("save", "save_to_buffer"),
}

# Others may have handlers of their own for each call.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LateUpdates(TorchFunctionMode):
    """While it is entered, fused operators that this thread calls are made later where they may."""

    def __init__(self, extension: ModuleType):
        super().__init__()
        self._extension = extension
        self._step, self._left_bytes = -1, 0
        os.register_at_fork(before=self.make_all)
        # Compiled Python modules, that is: their functions may use what they please.
        _before(importlib.machinery.ExtensionFileLoader, "create_module", self.make_all)
        for owner, names in _SERIALIZERS.items():
            for name in names:
                _before(getattr(torch._C, owner, None), name, self.make_all)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        if function in _FUSED and self._extension.defer_update(function.__name__, args, options):
            return None
        return function(*args, **options)

    def make_all(self) -> None:
        """Of earlier steps, those that are still to be made. Raises what kept one from it."""
        self._extension.make_deferred_updates()

    def may_take(self, tensors: list[torch.Tensor | None]) -> bool:
        """Whether one parameter's update may be made late, as far as can be told here: the
        extension tells the rest."""
        return all(t is None or type(t) in _PLAIN for t in tensors) and all(
            self._extension.is_managed(t) for t in tensors if t is not None
        )

    def left_bytes(self, step: int, most_bytes: int) -> int:
        """Of gradients that may wait after the optimizer's step of this number, those of other
        parameter groups taken off. 0 where somebody else looks at each call."""
        if any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()):
            return 0
        if step != self._step:
            self._step, self._left_bytes = step, most_bytes
        return self._left_bytes

    def take(self, grad_bytes: int) -> None:
        """So much of gradients waits."""
        self._left_bytes -= grad_bytes


def make_all_without(optimizer: Optimizer, extension: ModuleType) -> None:
    """Once the optimizer goes away nothing waits any more, or memory would not be freed. Its
    parameters tell nothing: torch swaps no tensor that has a weak reference."""
    weakref.finalize(optimizer, extension.make_deferred_updates).atexit = False


def _before(owner: type | None, name: str, function: Callable[[], None]) -> None:
    """Puts a call of `function` before each of `owner.name`."""
    original = getattr(owner, name, None)
    if original is None:
        return  # Another torch has it elsewhere.

    def called(self, *args, **kwargs):
        function()
        return original(self, *args, **kwargs)

    setattr(owner, name, _edges.hidden_from_compiler(functools.wraps(original)(called)))
