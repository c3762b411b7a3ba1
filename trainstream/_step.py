"""Around a step of any optimizer: what it may write counts as written, and steps are counted."""

import weakref
from collections.abc import Callable
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


# Steps in a row in which operators wrote all that an optimizer may write, before it is believed.
_BELIEVED = 3


class _Stranger:
    """An optimizer that is none of torch's: does it write by operators, or by kernels unseen?

    A kernel that takes bare addresses writes what no operator announces (apex, DeepSpeed): around
    its steps all counts as written, and no plan moves it. One that is written in torch's operators
    (Lion, Muon) announces each parameter and each state of its own; once it has for some steps, it
    is treated as torch's are, and as a stranger again after the first step in which it did not.
    """

    def __init__(self, extension: ModuleType):
        self._extension = extension
        self._announced_steps = 0

    def before(self, optimizer, args=None, kwargs=None) -> None:
        if self._announced_steps < _BELIEVED:
            self._extension.mark_written(_tensors_of(optimizer))
        self._extension.watch_writes()

    def after(self, optimizer) -> None:
        announced = self._extension.are_written(_written_by(optimizer))
        self._announced_steps = self._announced_steps + 1 if announced else 0
        if self._announced_steps < _BELIEVED:
            self._extension.mark_written(_tensors_of(optimizer))


def install(extension: ModuleType, after_step: Callable[[], None] | None = None) -> None:
    """Registers the hook. Called once for each process, when trainstream is switched on.

    Args:
        after_step: What else is to be done after each step; it never raises. Default None.
    """
    # By their optimizers' ids; each lives as long as the hook that it is.
    strangers: weakref.WeakValueDictionary[int, _Stranger] = weakref.WeakValueDictionary()

    # A compiled optimizer step would trace into the extension and warn that it cannot.
    @_edges.hidden_from_compiler
    def after(optimizer, args, kwargs) -> None:
        _stepped[id(optimizer)] = optimizer
        stranger = strangers.get(id(optimizer))
        if stranger is not None:
            stranger.after(optimizer)
        elif _writes_unseen(optimizer):
            extension.mark_written(_tensors_of(optimizer))
            # And before its next steps, or what leaves in the middle of one may leave too early.
            # Not for all optimizers: one more hook is one more break in a compiled step.
            stranger = strangers[id(optimizer)] = _Stranger(extension)
            optimizer.register_step_pre_hook(stranger.before)
        extension.step_done()
        if after_step is not None:
            after_step()

    register_optimizer_step_post_hook(after)


def _writes_unseen(optimizer: Optimizer) -> bool:
    """Whether its step may be a kernel that torch does not dispatch (apex, DeepSpeed).

    Torch's own steps are operators, and ours announces itself.
    """
    return not type(optimizer).__module__.startswith(("torch.optim.", "trainstream."))


def _params_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _states_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


def _written_by(optimizer: Optimizer) -> list[torch.Tensor]:
    """What each of its steps writes."""
    return [*(p for p in _params_of(optimizer) if p.requires_grad), *_states_of(optimizer)]


def _tensors_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All that a step of it may write, or read by its address."""
    params = _params_of(optimizer)
    grads = [p.grad for p in params if p.grad is not None]
    return [*params, *grads, *_states_of(optimizer)]
