"""trainstream: trains in a fraction of the device memory, with the same bits.

Nobody wraps a model: `PYTORCH_TRAINSTREAM=1 PYTORCH_TRAINSTREAM_CONF=vram:8GiB python train.py` is
all, or one call of `trainstream.enable()`. Importing this package imports neither torch nor the
extension; the functions do so when they are called.
"""

from trainstream.errors import BudgetError, ConfigError, TrainstreamError

__version__ = "0.1.0"
__all__ = [
    "Budget",
    "BudgetError",
    "ConfigError",
    "HardwareProfile",
    "MemoryPlanner",
    "TrainstreamError",
    "allocator",
    "enable",
    "is_cold",
    "is_enabled",
    "mark_step",
    "memory_report",
    "memory_stats",
    "pin",
    "profile_hardware",
    "session",
    "spill_activations",
    "unwrap",
    "wrap",
]


def enable(**keys: object) -> None:
    """Switches trainstream on in this process; the same as PYTORCH_TRAINSTREAM=1.

    Works after CUDA has started too, for storages made from then on. A second call with the same
    settings does nothing.

    Args:
        vram: Budget of device memory: bytes, a size ("8GiB"), a percent ("40%") or "auto".
            Default "auto".
        ram: Limit of page-locked host memory, likewise. Default "auto".
        device: "auto" (the GPU), "cuda", or "sim" (CPU tensors play the device). Default "auto".
        optimizer: "stock", the script's own; or "host", "stream", "hybrid" or "auto", the engine of
            trainstream.optim, whose Adam and AdamW torch.optim's then are. Default "stock".
        moments: "float32", "bfloat16" or "auto", of those optimizers. Default "auto".
        activations: "all" or a fraction ("0.5") is `spill_activations` around all that the calling
            thread does from now on; "auto" and "off": only where the script says. Default "auto".
        min_storage: Storages under this size are never touched. Default "1MiB".
        plan: True loads ahead of need once a step was recorded, False on demand only. Default True.
        late_updates: True makes pieces of fused steps of torch's own optimizers just before their
            weights are next used, where the run does not fit; False all at once. Default True.
        verify: True checks that every storage dropped without a copy loses nothing. Default False.
        report: File for the run report, which `trainstream report` shows; it is written every ten
            seconds and at the end. Default: none.
        log: "off", "warn", "info" or "debug". Default "warn".
        Keys not given come from PYTORCH_TRAINSTREAM_CONF where it names them.

    Raises:
        ConfigError: A key or value is wrong. The message names it and what is allowed.
        TrainstreamError: There is no such device, the extension is missing or built for another
            torch (both versions are named), or trainstream is on with other settings.
    """
    from trainstream import _switch

    _switch.switch_on(keys)


def allocator(**keys: object):
    """An allocator for `torch.cuda.memory.change_current_allocator`, which it needs no more than.

    Args:
        keys: As for `enable`; `device` can only be "cuda".

    Raises:
        ConfigError, TrainstreamError: As for `enable`; also when CUDA has already started.
    """
    from trainstream import _switch

    return _switch.make_allocator(keys)


def is_enabled() -> bool:
    """Whether trainstream is switched on in this process."""
    return _state() is not None


def pin(tensor) -> None:
    """Brings the storage of `tensor` into device memory and keeps it there for good.

    For memory that code outside torch uses at times nobody announces. Nothing happens while
    trainstream is off, or to a storage that it does not manage.

    Raises:
        TypeError: `tensor` is no torch.Tensor.
    """
    state = _state()
    if _check_tensor("pin", tensor) and state is not None:
        state.extension.pin(tensor)


def is_cold(tensor) -> bool:
    """Whether the bytes of `tensor` are in host memory now; False while trainstream is off.

    Raises:
        TypeError: `tensor` is no torch.Tensor.
    """
    state = _state()
    has_storage = _check_tensor("is_cold", tensor)
    return has_storage and state is not None and state.extension.is_cold(tensor)


def memory_stats() -> dict[str, int | float | str]:
    """Counters since switching on, sizes in bytes and times in ns; empty while trainstream is off.

    Keys: device, budget_bytes, peak_bytes, evicted_bytes, restored_bytes, in_place_bytes,
    dropped_bytes (left without a copy), spilled_bytes and returned_bytes (of evicted and restored:
    saved for backward, ahead of need), born_cold_bytes, host_in_use_bytes, page_locked_bytes,
    page_locked_bytes_peak, optimizer_bytes (trainstream.optim's states), host_limit_bytes,
    resident_bytes, cold_bytes, pins, evictions, restores, failures, growths, steps, copy_ns (copies
    ran, both directions added up), stall_ns (compute waited for them, as far as it was measured),
    deferred_updates (pieces of fused steps made late), waiting_updates (of those, yet to be made).
    """
    state = _state()
    return {} if state is None else dict(state.extension.stats())


def profile_hardware(refresh: bool = False):
    """Rates of the link and of host memory, and the memory that is available, as a HardwareProfile.

    Measured in under 2 s, once for each machine: `trainstream.hardware` says how and where it is
    kept. With trainstream on, its device is measured, within the budget, which may show in peaks
    (up to 128 MiB); else the current CUDA device.

    Args:
        refresh: Measure again, whatever was measured before. Default False.

    Raises:
        TrainstreamError: There is no device, or no extension that was built for this torch.
        RuntimeError: While a CUDA graph is captured, in a forked child, or from a broken device.
    """
    from trainstream import hardware

    return hardware.profile(refresh)


def spill_activations(share: float | str = "auto", min_size: int | str | None = None):
    """A context manager, and a decorator, around a forward pass: what it saves leaves early.

    Copies of what is saved for backward go to host memory while the forward pass goes on, and come
    back before backward asks for them; nothing waits for them. Without it the same tensors leave
    once their room is needed, and whoever needs the room waits. The bits are the same.

    Parameters, buffers, what the script itself holds, and on CUDA what is on the CPU stay. Does
    nothing while trainstream is off, inside the user's own saved-tensor hooks or those of
    torch.utils.checkpoint (which decide what is saved there), and where torch.compile traces it;
    around compiled functions it works. torch.func's transforms of functions refuse hooks.

    Args:
        share: Of the bytes saved, a number from 0 to 1: which storages that is, is the same in each
            step. "auto": as many bytes as the last step, ended by an optimizer or mark_step(), had
            too much, so none while the run fits. Default "auto".
        min_size: Storages under it stay: bytes or a size ("4MiB"). Default None: `min_storage`,
            under which nothing is moved at all.

    Raises:
        ValueError: An argument is none of these.
        TypeError: It decorates something else than a function that returns once it is done.
    """
    from trainstream import _spill

    return _spill.make(share, min_size)


def mark_step() -> None:
    """Says that a step ends here, for loops that repeat without an optimizer, such as inference.

    After two of them what the third will need, and when, is known, and is loaded ahead. A step of
    any torch.optim.Optimizer says so by itself; both for the same step would count it twice. Does
    nothing while trainstream is off.
    """
    state = _state()
    if state is not None:
        state.extension.step_done()


def memory_report(model=None, *, as_dict: bool = False):
    """What takes memory now, by what it is and where it is: lines for a person.

    Kinds: weights (buffers too), gradients, optimizer (states of every optimizer that has made a
    step), activations (whatever else trainstream manages: results of operators, batches), other
    (workspaces, and what is too small to be managed). Places: the device, page-locked and pageable
    host memory, and host copies of what is on the device. Nothing is moved by looking.

    Args:
        model: A torch.nn.Module, whose names storages get. Default None: parameters of optimizers
            are numbered.
        as_dict: True returns a dictionary instead: "now" (bytes by kind and place), "total" (by
            place), "peak" (as far as known: of the device and the host, not by kind), "biggest"
            (the ten largest storages: names, kind, place, bytes, pinned), "enabled" and "device".
            Default False.

    While trainstream is off, the numbers are torch's own and those of the model's tensors.

    Raises:
        TypeError: `model` is no torch.nn.Module.
    """
    from torch.nn import Module

    from trainstream import errors, reports

    if model is not None and not isinstance(model, Module):
        raise errors.not_a_module("memory_report", model)
    report = reports.make(model)
    return report if as_dict else reports.as_text(report)


def report(*, as_dict: bool = False, measure: bool = True):
    """The plan, what a step was to take and took, and what limits it: lines for a person.

    A step is the one of median length of the last few that paging was on for, as the device counts:
    compute (what is left when nothing is waited for) and the waits for copies, by cause. The bound
    is max(compute, to device, to host, host memory), where host memory counts what cores and copies
    touch together; its largest term limits.

    Args:
        as_dict: True returns a dictionary instead: "enabled", "device", "steps", "plan" and, once a
            step was measured, "step_seconds", "compute_seconds", "predicted_seconds" (None without
            a plan), "stall_seconds" (by cause: late, demand, room), "bytes" (of a step, by way),
            "bound" (seconds by term; None where rates are not known), "bound_seconds" and "limit"
            (the term). Default False.
        measure: Measure this machine's rates if they never were (under 2 s). Default True.

    Raises:
        As profile_hardware, where it measures.
    """
    from trainstream import step_report

    known = step_report.known_rates() if is_enabled() else None
    if known is None and measure and is_enabled():
        known = step_report.measured_rates()
    made = step_report.make(known)
    return made if as_dict else step_report.as_text(made)


def wrap(
    model,
    optimizer=None,
    device="auto",
    *,
    vram=None,
    ram=None,
    offload="auto",
    param_offload="auto",
    activation_offload="auto",
    moment_dtype="auto",
    check_memory=True,
    distributed="auto",
    max_grad_norm=None,
    accumulation_steps=None,
    prefetch_depth=1,
    blocks=None,
):
    """Prepares a model and its optimizer for training in less memory: the explicit way.

        model, optimizer = trainstream.wrap(model, optimizer, vram="12GiB")
        for batch in loader:            # as ever
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(*trainstream.session(model).events, sep="\\n")

    Switches trainstream on where it is not, moves the model to the device, and tells the pager
    which blocks (transformer layers) belong in host memory. Model and optimizer stay the objects
    that they are, so schedulers made before go on.

    Args:
        model: A torch.nn.Module, on the CPU or the device.
        optimizer: A torch.optim.Optimizer, or None for a model that is not trained. Default None.
        device: "cuda", "cuda:1", "sim", or "auto": what is switched on, else the GPU. Default
            "auto".
        vram, ram: As for `enable`. Default None: what is switched on, else "auto".
        offload: Whether Adam and AdamW become those of `trainstream.optim`, with states in host
            memory. "auto": where not all is expected to fit; after two measured steps torch's
            fused one if all fits, and host memory if not. The switch changes rounding, as the
            two do; True and False never switch. Default "auto".
        param_offload: Which blocks are paged: "auto" (by estimate, then by measured peaks), True
            (all), False (none), a share of them as a float from 0.0 to 1.0, or their indices.
            Default "auto".
        activation_offload: Share of activations that are spilled: True (all), a float, "auto" and
            False (what the pager finds coldest). Default "auto".
        moment_dtype: "float32", "bfloat16" (stochastic rounding) or "auto": float32 where host
            memory has room for them. Needs the optimizer in host memory. Default "auto".
        check_memory: Refuse what cannot fit. False lets the run show it. Default True.
        distributed: Data parallel: weights from rank 0, and gradients averaged over the default
            process group before each step, over NCCL where it has that, else in host memory.
            "auto": where the group has more than one rank, and the model does not do so itself. A
            `clip_grad_norm_` of the script's would come too early (give max_grad_norm), and a
            GradScaler is refused. Default "auto".
        max_grad_norm: Clips the global norm of the gradients in step(). Default None.
        accumulation_steps: Backward passes that make a step: lets updates run during the last one,
            as `trainstream.optim.AdamW` has it. With clipping or several ranks, whose gradients
            must be whole first, updates wait for step(). Default None.
        prefetch_depth: Paged blocks that may be on the device on their way in or out, beside the
            one in use; more hides slower links and takes room. Default 1.
        blocks: The path of the module whose children are the blocks ("model.layers"), or a list of
            their paths. Default None: the longest ModuleList (or Sequential) of one class.

    Returns:
        (model, optimizer), the same objects.

    Raises:
        BudgetError: A MemoryError: host RAM or device memory is too small; it has the arithmetic.
        ConfigError, ValueError, TypeError: An argument is wrong; nothing was changed.
        TrainstreamError: It cannot be switched on, or the model is wrapped already.
    """
    from trainstream.explicit import _wrapping
    from trainstream.explicit._options import Options

    options = Options(
        device=device,
        vram=vram,
        ram=ram,
        offload=offload,
        param_offload=param_offload,
        activation_offload=activation_offload,
        moment_dtype=moment_dtype,
        check_memory=check_memory,
        distributed=distributed,
        max_grad_norm=max_grad_norm,
        accumulation_steps=accumulation_steps,
        prefetch_depth=prefetch_depth,
        blocks=blocks,
    )
    return _wrapping.wrap(model, optimizer, options)


def unwrap(model):
    """Undoes `wrap`: everything on the device, every hook gone, torch's own optimizer again.

    The optimizer keeps its state, in the parameters' type as torch has it. Trainstream stays on in
    this process, since memory that it manages lives on; while all fits it costs nothing.

    Returns:
        The model.

    Raises:
        TrainstreamError: It is not wrapped.
    """
    from trainstream.explicit import _wrapping

    return _wrapping.unwrap(model)


def session(model):
    """What `wrap` set up for `model`: `.pager` (page(i), unpage(i), paged, block_bytes,
    bytes_paged, stats), `.planner` (None where the caller chose the blocks), `.optimizer` and
    `.events`.

    Raises:
        TrainstreamError: It is not wrapped.
    """
    from trainstream.explicit import _wrapping

    return _wrapping.session(model)


def __getattr__(name: str):
    """Classes, once someone asks: most runs need none of them, and import little."""
    if name == "HardwareProfile":
        from trainstream.hardware import HardwareProfile

        return HardwareProfile
    if name in ("Budget", "MemoryPlanner"):
        from trainstream import planner

        return getattr(planner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _state():
    """What is on, without importing torch to learn that nothing is."""
    import sys

    switch = sys.modules.get("trainstream._switch")
    return None if switch is None else switch.current()


def _check_tensor(function: str, value: object) -> bool:
    """True for a tensor that has a storage, False for one that has none; no tensor raises."""
    import torch

    if not isinstance(value, torch.Tensor):
        from trainstream import errors

        raise errors.not_a_tensor(function, value)
    return torch._C._has_storage(value)
