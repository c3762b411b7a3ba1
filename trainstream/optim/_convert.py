"""Torch's Adam and AdamW become trainstream's, and back: the same object, groups, state and hooks.

In place, since schedulers, scalers and the script itself hold on to the optimizer that they know.
"""

import weakref

import torch

from trainstream import errors
from trainstream.optim.adamw import Adam, AdamW, _HostOptimizer

# Ours is a subclass of torch's, which torch.optim may not name any more: see `optimizer:host`.
_OURS = {ours.__bases__[-1]: ours for ours in (Adam, AdamW)}
_STOCK = {ours: stock for stock, ours in _OURS.items()}
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


def why_not(optimizer) -> str:
    """Why to_host() cannot take this optimizer over; "" where it can."""
    if type(optimizer) not in (*_OURS, *_STOCK):
        return f"{type(optimizer).__name__} is neither torch.optim.Adam nor AdamW"
    for name in _UNSUPPORTED:
        if any(group.get(name) for group in optimizer.param_groups):
            return f"{name}=True is not supported"
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its step() was replaced by a function that is not known here"
    return ""


def is_host(optimizer) -> bool:
    """Whether its states are in host memory: it is one of trainstream.optim."""
    return isinstance(optimizer, _HostOptimizer)


def to_host(optimizer, *, moments: str, max_grad_norm, accumulation_steps) -> None:
    """Makes a torch.optim.Adam or AdamW, or one of ours, one of ours with these settings.

    Its state is taken over; parameters that have none yet get theirs at the first step.

    Raises:
        ValueError: why_not(optimizer), or a setting is out of range.
    """
    reason = why_not(optimizer)
    if reason:
        raise errors.not_taken_over(reason)
    before = type(optimizer), dict(vars(optimizer))
    if is_host(optimizer):
        optimizer.synchronize()
        optimizer._early = None
    else:
        optimizer.__class__ = _OURS[type(optimizer)]
    try:
        _become_host(optimizer, moments, max_grad_norm, accumulation_steps)
    except BaseException:
        optimizer.__class__ = before[0]
        vars(optimizer).clear()
        vars(optimizer).update(before[1])
        raise


def _become_host(optimizer, moments, max_grad_norm, accumulation_steps) -> None:
    kept = dict(vars(optimizer))
    optimizer._set_up("auto", moments, max_grad_norm, accumulation_steps, seed=0)
    if "_slots" in kept:  # It was ours: its masters are worth more than its weights.
        optimizer._slots = kept["_slots"]
        optimizer._settings |= {name: kept["_settings"][name] for name in ("engine", "seed")}
        if optimizer._slots or moments == "auto":
            optimizer._moment_dtype = kept["_moment_dtype"]
    optimizer._patch_step_function()
    _rebind_step(optimizer)
    with torch.no_grad():
        for param, state in optimizer.state.items():
            if "exp_avg" in state:
                optimizer._slot_of(param)
    optimizer._watch_gradients()


def to_stock(optimizer, *, fused: bool = False) -> None:
    """Makes one of ours torch's again, with its states beside the parameters, as torch would have
    them: of the parameter's type. Masters of half-precision weights are given up.

    Args:
        fused: Choose torch's fused step where the script chose neither that nor foreach. Default
            False: groups stay as they are.
    """
    optimizer.synchronize()
    optimizer._early = None  # Its hooks go with it.
    with torch.no_grad():
        for param, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    value = torch.empty_like(param, dtype=param.dtype)
                    state[name] = value.copy_(state[name])
    ours = ("_settings", "_slots", "_moment_dtype", "grad_norm", "share", "_share", "_share_lock")
    for name in (*ours, "_places", "_early"):
        vars(optimizer).pop(name, None)
    optimizer.__class__ = _STOCK[type(optimizer)]
    _settle_fused(optimizer, fused)
    optimizer._patch_step_function()
    _rebind_step(optimizer)


def _settle_fused(optimizer, fused: bool) -> None:
    """A fused step has its counters beside the weights, and takes scaled gradients."""
    for group in optimizer.param_groups:
        if fused and group.get("fused") is None and not group.get("foreach"):
            group["fused"], group["foreach"] = True, False
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            if group.get("fused") and isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(param.device)
    if all(group.get("fused") for group in optimizer.param_groups):
        optimizer._step_supports_amp_scaling = True


def _rebind_step(optimizer) -> None:
    """A scheduler has put a function that calls the step of the class it met before the method."""
    if "step" not in vars(optimizer):
        return
    myself = weakref.ref(optimizer)

    def step(*args, **kwargs):
        optimizer = myself()
        optimizer._opt_called = True  # What the scheduler's function is for.
        return type(optimizer).step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True
    optimizer.step = step
