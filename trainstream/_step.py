"""Around a step of any optimizer: what it may write counts as written, and steps are counted."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trainstream import _edges

# Those that have made a step while trainstream was on; what reports find their states by.
# By their ids, since a class of the user's need not be hashable.
_stepped: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()


def stepped_optimizers() -> list[Optimizer]:
    """The living optimizers that have made a step since trainstream was switched on."""
    return list(_stepped.values())


def install(extension: ModuleType, after_step: Callable[[], None] | None = None) -> None:
    """Registers the hook. Called once for each process, when trainstream is switched on.

    Args:
        after_step: What else is to be done after each step; it never raises. Default None.
    """
    # Those whose kernels nobody announces; and what says so to the pager, of each that steps now.
    unseen: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
    stepping: dict[int, object] = {}

    def before(optimizer, args, kwargs) -> None:
        for key in [key for key in stepping if key not in unseen]:
            del stepping[key]  # Its last step failed, and it is gone.
        stepping[id(optimizer)] = extension.UnseenStep()
        extension.mark_written(_tensors_of(optimizer))

    def hear(optimizer) -> None:
        """Of an optimizer from its first step on. Not by a hook for all: one more hook is one more
        break in a compiled step."""
        if _writes_unseen(optimizer) and unseen.get(id(optimizer)) is not optimizer:
            unseen[id(optimizer)] = optimizer
            optimizer.register_step_pre_hook(before)

    # A compiled optimizer step would trace into the extension and warn that it cannot.
    @_edges.hidden_from_compiler
    def after(optimizer, args, kwargs) -> None:
        _stepped[id(optimizer)] = optimizer
        if _writes_unseen(optimizer):
            extension.mark_written(_tensors_of(optimizer))
            stepping.pop(id(optimizer), None)
            hear(optimizer)  # It is older than the hook.
        extension.step_done()
        if after_step is not None:
            after_step()

    register_optimizer_step_post_hook(after)
    _after_creation(hear)


def _after_creation(function: Callable[[Optimizer], None]) -> None:
    """Calls it with each optimizer that is made, or comes out of a pickle, from now on."""
    original = Optimizer._patch_step_function

    @functools.wraps(original)
    def patched(optimizer) -> None:
        original(optimizer)
        if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # Wrappers leave torch's out.
            function(optimizer)

    Optimizer._patch_step_function = patched


def _writes_unseen(optimizer: Optimizer) -> bool:
    """Whether its step may be a kernel that torch does not dispatch (apex, DeepSpeed).

    Torch's own steps are operators, and ours announces itself.
    """
    return not type(optimizer).__module__.startswith(("torch.optim.", "trainstream."))


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    return [*params, *grads, *_tensors_in(optimizer.state)]


def _tensors_in(value) -> Iterator[torch.Tensor]:
    """Of a state, however it is nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors_in(each)
