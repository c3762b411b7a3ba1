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
    "spill_activations",
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
    resident_bytes, cold_bytes, pins, evictions, restores, failures, growths, stall_ns, steps.
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
