"""Around a step of any optimizer: what it may write counts as written, and steps are counted."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from trainstream import _edges, _late

# Those that have made a step while trainstream was on; what reports find their states by.
# By their ids, since a class of the user's need not be hashable.
_stepped: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()

# None: trainstream was not switched on here; an optimizer with our hook came out of a pickle.
_extension: ModuleType | None = None


class _Stepping(threading.local):
    """A thread's steps under way of optimizers whose kernels nobody announces, the innermost last:
    for each the depth of the call, the optimizer's id, and what says so to the pager."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, object]] = []

    def begin(self, optimizer: Optimizer, depth: int) -> None:
        # One at the same depth or below has ended: it failed, and torch calls no hook then.
        while self.steps and self.steps[-1][0] >= depth:
            self.steps.pop()
        self.steps.append((depth, id(optimizer), _extension.UnseenStep()))

    def end(self, optimizer: Optimizer) -> None:
        # By its id, since in a compiled step this may be called from deeper than begin() was. A
        # step may call that of its base class, so it is the innermost of them.
        for i in reversed(range(len(self.steps))):
            if self.steps[i][1] == id(optimizer):
                del self.steps[i:]
                return


_stepping = _Stepping()


def stepped_optimizers() -> list[Optimizer]:
    """The living optimizers that have made a step since trainstream was switched on."""
    return list(_stepped.values())


def install(extension: ModuleType, after_step: Callable[[], None] | None = None) -> None:
    """Registers the hook. Called once for each process, when trainstream is switched on.

    Args:
        after_step: What else is to be done after each step; it never raises. Default None.
    """
    global _extension
    _extension = extension

    # A compiled optimizer step would trace into the extension and warn that it cannot.
    @_edges.hidden_from_compiler
    def after(optimizer, args, kwargs) -> None:
        if _stepped.get(id(optimizer)) is not optimizer:
            _stepped[id(optimizer)] = optimizer
            _late.make_all_without(optimizer, extension)
        if _writes_unseen(optimizer):
            extension.mark_written(_tensors_of(optimizer))
            _stepping.end(optimizer)
        extension.step_done()
        if after_step is not None:
            after_step()

    register_optimizer_step_post_hook(after)
    if any(_is_hooked(each) for each in _classes_below(Optimizer) if _is_foreign(each)):
        register_optimizer_step_pre_hook(_before_older)
    _after_creation(_hear)


@_edges.hidden_from_compiler
def _before(optimizer, args, kwargs) -> None:
    """A module's function, since a class may pickle its hooks."""
    if _extension is not None:
        _stepping.begin(optimizer, _depth())
        _extension.mark_written(_tensors_of(optimizer))


@_edges.hidden_from_compiler
def _before_older(optimizer, args, kwargs) -> None:
    """Of one that was made before trainstream was switched on."""
    if _writes_unseen(optimizer) and not _is_heard(optimizer):
        _hear(optimizer)  # Torch has yet to come to the hooks of the optimizer itself.


def _hear(optimizer: Optimizer) -> None:
    """Of an optimizer from its first step on. Not by a hook for all: one more hook is one more
    break in a compiled step."""
    if _writes_unseen(optimizer) and not _is_heard(optimizer):
        optimizer.register_step_pre_hook(_before)


def _is_heard(optimizer: Optimizer) -> bool:
    return _before in optimizer._optimizer_step_pre_hooks.values()


def _after_creation(function: Callable[[Optimizer], None]) -> None:
    """Calls it with each optimizer that is made, or comes out of a pickle, from now on."""
    original = Optimizer._patch_step_function

    @functools.wraps(original)
    def patched(optimizer) -> None:
        original(optimizer)
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # Wrappers leave torch's out.
            function(optimizer)

    Optimizer._patch_step_function = patched


def _depth() -> int:
    """Of the function that called the function that asks."""
    depth, frame = 0, sys._getframe(2)
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def _writes_unseen(optimizer: Optimizer) -> bool:
    """Whether its step may be a kernel that torch does not dispatch (apex, DeepSpeed)."""
    return _is_foreign(type(optimizer))


def _is_foreign(optimizer_class: type[Optimizer]) -> bool:
    """Torch's own steps are operators, and ours announces itself."""
    return not optimizer_class.__module__.startswith(("torch.optim.", "trainstream."))


def _is_hooked(optimizer_class: type[Optimizer]) -> bool:
    """Whether there has been one: torch puts its hooks around a class's step then."""
    return getattr(optimizer_class.step, "hooked", False)


def _classes_below(base: type) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _classes_below(each)


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Its parameters, their gradients, and what else it holds: states, flat buffers."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    return [*params, *grads, *_tensors_in([vars(optimizer), optimizer.state], set())]


def _tensors_in(value, seen: set[int]) -> Iterator[torch.Tensor]:
    """However it is nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(each, seen)
