"""The places where torch hands memory out and no operator announces it.

Operators are watched by the extension. An address that leaves torch is not, so the calls below say
so first: *briefly* for an address that is used at once, *for good* where it may be kept. They are
patched when trainstream is switched on and never restored, since addresses given out stay out.

Lowest points only: `np.asarray(t)` and `Tensor.__array__` come through `Tensor.numpy`; DLPack's
`Tensor.__dlpack__` and `torch.from_dlpack` through `torch._C._to_dlpack*`; `share_memory_`, queues
and spawned workers through the `_share_*` functions; Triton's and Inductor's launchers call the
Python method `data_ptr`. Checked in torch 2.11 and 2.15 and their Tritons.
"""

import ctypes
import functools
import sys
from collections.abc import Callable
from types import ModuleType

import torch

# False for wrapper subclasses, sparse tensors and others that keep no memory of their own. Fake and
# meta tensors have a storage without memory, which the extension does not know and leaves alone.
_has_storage = torch._C._has_storage

# Functions whose address C has been given; they must live as long as the process.
_kept_for_c: list[object] = []


def install(extension: ModuleType, device: str) -> None:
    """Patches torch. Called once for each process.

    Args:
        extension: The module `trainstream._C`.
        device: "sim" or "cuda": where the managed storages are.
    """
    pin, pin_briefly = extension.pin, extension.pin_briefly
    storage_for_good = _storage_pinner(extension.pin_storage, forever=True)
    storage_briefly = _storage_pinner(extension.pin_storage, forever=False)
    if device == "sim":
        _patch_memory_of_cpu_tensors(pin)
        _patch_compiled_cpu_kernels(pin_briefly)
        # A plain CPU tensor's address stays right for as long as the tensor lives. So must this.
        tensor_address = _by_caller(pin, pin_briefly)
        storage_address = _by_caller(storage_for_good, storage_briefly)
    else:
        _patch_cuda_array_interface(pin)
        # Used for a launch, then forgotten: pinning for good would pin whatever Triton ever saw.
        tensor_address, storage_address = pin_briefly, storage_briefly
    for name in ("data_ptr", "const_data_ptr"):
        _announce(torch.Tensor, name, tensor_address)
    _announce_storage("data_ptr", storage_address)
    _patch_dlpack(pin)
    _patch_storages(storage_for_good, storage_briefly)


def _storage_pinner(pin_storage: Callable, forever: bool) -> Callable:
    def announce(storage) -> None:
        pin_storage(storage, forever)

    return announce


def _announce(owner: type | ModuleType, name: str, announce: Callable) -> None:
    """Replaces `owner.name` by a function that calls `announce(tensor)`, then the original.

    First, since the original reads the address and announcing may change it.
    """

    def announced(self, *args, **kwargs):
        if _has_storage(self):
            announce(self)
        return original(self, *args, **kwargs)

    original = _replace(owner, name, announced)


def _announce_storage(name: str, announce: Callable) -> None:
    """The same for a method of UntypedStorage, and for the storages among its arguments."""

    def announced(self, *args, **kwargs):
        announce(self)
        for value in args:
            if isinstance(value, torch.UntypedStorage):
                announce(value)
        return original(self, *args, **kwargs)

    original = _replace(torch.UntypedStorage, name, announced)


def _replace(owner: type | ModuleType, name: str, announced: Callable) -> Callable | None:
    """Puts `announced` in the place of `owner.name`, which it returns.

    None where this torch has no such name: older or newer ones have more.
    """
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, hidden_from_compiler(functools.wraps(original)(announced)))
    return original


def hidden_from_compiler(function: Callable) -> Callable:
    """Keeps torch.compile out of `function` and what it calls, as `torch._dynamo.disable` would.

    Where it compiles a call of a tensor's method it knows the method by name and never looks here.
    Where it falls back to Python it would try to compile this very function, and warn. Done by hand
    since `torch._dynamo` takes a second to import, which most scripts never need.
    """
    function._torchdynamo_disable = True
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    except AttributeError:
        pass  # Another torch: what is lost is a graph break without a warning.
    return function


def _by_caller(for_good: Callable, briefly: Callable) -> Callable:
    """Announces for good, but briefly when torch's own Python code is what asks.

    Torch itself compares addresses (torch.save does, for every storage) or uses them at once;
    pinning for good there would pin a whole model at its first checkpoint.
    """

    def announce(value) -> None:
        frame = sys._getframe(2)  # 0 is this function, 1 the patched method.
        # `TypedStorage.data_ptr` and its like only pass the question on.
        while frame is not None and frame.f_globals.get("__name__") == "torch.storage":
            frame = frame.f_back
        caller = "" if frame is None else frame.f_globals.get("__name__") or ""
        (briefly if caller.startswith("torch.") else for_good)(value)

    return announce


def _patch_memory_of_cpu_tensors(pin: Callable) -> None:
    _patch_numpy(pin)
    # Python loops over the elements in place, with no operator that would count as writing, and
    # calls a function for each that may use as many operators as it likes.
    for name in ("apply_", "map_", "map2_"):
        _announce(torch.Tensor, name, pin)
    # Reads the elements through the bare address while other threads may need room, after a few
    # operators of its own, which would end a brief pin.
    _announce(torch.Tensor, "tolist", pin)


def _patch_numpy(pin: Callable) -> None:
    original = torch.Tensor.numpy

    def announced(self, *, force=False):
        # What `force` stands for, by its own documentation; done here since the array keeps the
        # address of what comes out, for as long as anyone keeps the array.
        tensor = self.detach().cpu().resolve_conj().resolve_neg() if force else self
        if _has_storage(tensor):
            pin(tensor)
        return original(tensor)

    torch.Tensor.numpy = hidden_from_compiler(functools.wraps(original)(announced))


def _patch_compiled_cpu_kernels(pin_briefly: Callable) -> None:
    """Announces the arguments of the C++ kernels that Inductor compiles, which may write to them.

    Such a kernel asks one C function for the address of each tensor, and is told where that
    function is when it is loaded. So it is told of ours.
    """
    guards, name = torch._C._dynamo.guards, "_torchinductor_pyobject_tensor_data_ptr"
    if not isinstance(getattr(guards, name, None), int):
        return
    # Called by C, with the interpreter's lock held, and calling C in the same way.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)
    original = prototype(getattr(guards, name))

    def address(tensor) -> int:
        try:
            if _has_storage(tensor):
                pin_briefly(tensor)
        except Exception:
            pass  # C could not see it, and the address is valid where the storage is now, too.
        return original(tensor) or 0

    announced = prototype(hidden_from_compiler(address))
    _kept_for_c.append(announced)
    setattr(guards, name, ctypes.cast(announced, ctypes.c_void_p).value)


def _patch_cuda_array_interface(pin: Callable) -> None:
    # Numba and CuPy keep the address. Its getter calls data_ptr(), which alone would pin briefly.
    original = torch.Tensor.__cuda_array_interface__

    def announced(self):
        if _has_storage(self):
            pin(self)
        return original.fget(self)

    getter = hidden_from_compiler(functools.wraps(original.fget)(announced))
    torch.Tensor.__cuda_array_interface__ = original.getter(getter)


def _patch_dlpack(pin: Callable) -> None:
    # The consumer keeps the address, and its deleter keeps our storage, for as long as it likes.
    plain = torch._C._to_dlpack
    for name in ("_to_dlpack", "_to_dlpack_versioned"):
        _announce(torch._C, name, pin)
    for module in (torch, torch.utils.dlpack):
        if getattr(module, "to_dlpack", None) is plain:
            module.to_dlpack = torch._C._to_dlpack
    # A table of C functions that gives addresses away and that nothing can be put in front of.
    # Without it, its users (apache-tvm-ffi and what is built on it) ask `__dlpack__` instead.
    for owner in (torch.Tensor, getattr(torch.utils.dlpack, "ReadOnlyTensorWrapper", None)):
        if owner is not None and "__dlpack_c_exchange_api__" in vars(owner):
            del owner.__dlpack_c_exchange_api__


def _patch_storages(for_good: Callable, briefly: Callable) -> None:
    # Copies from the old memory to the new, without an operator.
    _announce_storage("resize_", briefly)
    _patch_storage_slices(for_good)
    # Read or write the memory without an operator; used by the old file format.
    for name in ("_set_from_file", "_byteswap", "_write_file"):
        _announce_storage(name, briefly)
    # Another process maps the memory, or the memory becomes another storage's.
    for name in ("_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_", "_swap_data_ptr_"):
        _announce_storage(name, for_good)


def _patch_storage_slices(for_good: Callable) -> None:
    original = torch.UntypedStorage.__getitem__

    def announced(self, *args, **kwargs):
        # A slice is a storage of its own that keeps an address inside this one.
        if args and isinstance(args[0], slice):
            for_good(self)
        return original(self, *args, **kwargs)

    torch.UntypedStorage.__getitem__ = hidden_from_compiler(functools.wraps(original)(announced))
