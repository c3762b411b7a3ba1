"""Fused optimizer steps made when their weights are next used.

Between a step and the next use of a weight, of its gradient or of its states nobody can tell
whether the update was made. Made all at once, its bytes pass over the link while the model waits;
made one by one before those uses, they pass while it computes. The extension makes them
(deferred_updates.h). What is here hands them over, and has them made where neither an operator nor
an address given out would tell: before a fork, before a compiled module is loaded, and once a model
goes away.
"""

import functools
import importlib.machinery
import os
import weakref
from collections.abc import Callable
from types import ModuleType

import torch
from torch.overrides import TorchFunctionMode

from trainstream import _edges

# They write the tensors of their lists and nothing else, each its own.
_FUSED = {
    getattr(torch, name)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    if hasattr(torch, name)
}


class LateUpdates(TorchFunctionMode):
    """While it is entered, fused operators that this thread calls are made later where they may."""

    def __init__(self, extension: ModuleType):
        super().__init__()
        self._extension = extension
        self._params: dict[int, weakref.ref] = {}
        self._step, self._left_bytes = -1, 0
        os.register_at_fork(before=self.make_all)
        _before_modules_load(self.make_all)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        if function in _FUSED and self._extension.defer_update(function.__name__, args, options):
            return None
        return function(*args, **options)

    def make_all(self) -> None:
        """Of earlier steps, those that are still to be made. Raises what kept one from it."""
        self._extension.make_deferred_updates()

    def left_bytes(self, step: int, most_bytes: int) -> int:
        """Of gradients that may wait after the optimizer's step of this number, those of other
        parameter groups taken off."""
        if step != self._step:
            self._step, self._left_bytes = step, most_bytes
        return self._left_bytes

    def take(self, params: list[torch.Tensor], grad_bytes: int) -> None:
        """These wait. Once one of the parameters goes away none does, or its memory would stay."""
        self._left_bytes -= grad_bytes
        for param in params:
            known = self._params.get(id(param))
            if known is None or known() is not param:
                forget = functools.partial(self._forget, id(param))
                self._params[id(param)] = weakref.ref(param, forget)

    def _forget(self, key: int, reference: weakref.ref) -> None:
        if self._params.get(key) is reference:
            del self._params[key]
        self.make_all()


def _before_modules_load(function: Callable[[], None]) -> None:
    """Compiled Python modules, that is: their functions may use what they please."""
    loader = importlib.machinery.ExtensionFileLoader
    original = loader.create_module

    def create_module(self, spec):
        function()
        return original(self, spec)

    loader.create_module = _edges.hidden_from_compiler(create_module)
