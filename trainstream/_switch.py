"""Switching on: from a configuration to a running extension, once for each process.

Apart from the public face, which must import without torch.
"""

import importlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from types import ModuleType

import torch

from trainstream import _edges, _exit, _foreach, _record, _spill, _step, config, errors


@dataclass(frozen=True)
class State:
    """What is on in this process.

    Args:
        config: The configuration asked for.
        device: "sim" or "cuda".
        extension: The module `trainstream._C`.
        started_ns: Monotonic time of switching on.
    """

    config: config.Config
    device: str
    extension: ModuleType
    started_ns: int


_lock = threading.Lock()
_state: State | None = None
_tried = False


def current() -> State | None:
    return _state


def was_tried() -> bool:
    """Whether someone asked for trainstream in this process, with success or without."""
    return _tried


def switch_on(keys: dict[str, object]) -> None:
    """Reads the configuration, installs the allocator, the edges, split steps and the exit line.

    Args:
        keys: Settings that take precedence over PYTORCH_TRAINSTREAM_CONF.

    Raises:
        ConfigError: A key or value is wrong.
        TrainstreamError: No such device, wrong torch, no extension, or on with other settings.
    """
    global _tried
    _tried = True
    with _lock:
        wanted = _wanted(keys)
        if _is_on_with(wanted):
            return
        extension = load_extension()
        device = _choose_device(extension, wanted)
        if device == "sim":
            _start_sim(extension, wanted)
        else:
            _cuda_allocator(extension, wanted)
            extension.install_cuda_allocator()
        _finish(wanted, device, extension)


def make_allocator(keys: dict[str, object]):
    """The allocator for `torch.cuda.memory.change_current_allocator`; see trainstream.allocator."""
    global _tried
    _tried = True
    with _lock:
        wanted = _wanted({"device": "cuda", **keys})
        if wanted.device != "cuda":
            raise errors.bad_value("device", wanted.device, "cuda, for trainstream.allocator()")
        if torch.cuda.is_initialized():
            raise errors.cuda_already_started()
        extension = load_extension()
        _choose_device(extension, wanted)
    return _Allocator(wanted, extension)


class _Allocator(torch.cuda.memory._CUDAAllocator):
    """Hands torch the C++ allocator, and counts as switched on from then on."""

    def __init__(self, wanted: config.Config, extension: ModuleType):
        super().__init__(_cuda_allocator(extension, wanted))
        self._wanted, self._extension = wanted, extension

    def allocator(self):
        # Here and not in __init__: an allocator that is made and never used changes nothing.
        with _lock:
            if not _is_on_with(self._wanted):
                _finish(self._wanted, "cuda", self._extension)
        return super().allocator()


def _wanted(keys: dict[str, object]) -> config.Config:
    conf = config.parse_conf(os.environ.get(config.CONF_VARIABLE, ""))
    return config.with_keywords(conf, keys)


def _is_on_with(wanted: config.Config) -> bool:
    if _state is not None and _state.config != wanted:
        raise errors.already_enabled(str(_state.config), str(wanted))
    return _state is not None


def load_extension() -> ModuleType:
    """Imports `trainstream._C` once it is known to fit this torch.

    The check comes first because a library built for another torch may crash while it loads.
    """
    try:
        built = importlib.import_module("trainstream._build_info")
    except ImportError:
        raise errors.not_built("it was never built: _build_info.py is missing") from None
    built_minor, running_minor = (_minor(v) for v in (built.torch_version, torch.__version__))
    # Built without CUDA, it needs nothing of torch's CUDA libraries and fits any of them.
    same_cuda = not built.cuda or built.cuda == torch.version.cuda
    if built_minor != running_minor or not same_cuda:
        raise errors.other_torch(
            _version_text(built.torch_version, built.cuda),
            _version_text(torch.__version__, torch.version.cuda),
        )
    try:
        return importlib.import_module("trainstream._C")
    except ImportError as fault:
        raise errors.not_built(" ".join(str(fault).split())) from fault


def _minor(version: str) -> list[str]:
    return str(version).partition("+")[0].split(".")[:2]


def _version_text(version: str, cuda: str | None) -> str:
    number = str(version).partition("+")[0]
    return f"{number} with CUDA {cuda}" if cuda else f"{number} without CUDA"


def _choose_device(extension: ModuleType, wanted: config.Config) -> str:
    if wanted.device == "sim":
        return "sim"
    if not extension.has_cuda:
        raise errors.no_gpu("this trainstream was built without CUDA")
    # Torch asks NVML first. Asking the driver would start it, and then children by fork could not
    # be the first to use CUDA, which plain torch allows.
    if torch.cuda.device_count() == 0:
        count, reason = extension.cuda_device_count()
        if count == 0:
            raise errors.no_gpu(reason)
    _check_backend()
    return "cuda"


def _check_backend() -> None:
    """Ours is a layer over torch's native allocator: budget, blocks and statistics are that one's.

    Over another one every part of it would fail on its own, in the middle of the script.
    """
    if hasattr(torch._C, "_cuda_getAllocatorBackend"):
        backend = torch._C._cuda_getAllocatorBackend()
        if backend != "native":
            raise errors.other_backend(backend)


def _start_sim(extension: ModuleType, wanted: config.Config) -> None:
    # A simulated device has no memory of its own: what there is, is this machine's.
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    vram_bytes = wanted.vram.resolved(total_bytes) or total_bytes
    ram_bytes = wanted.ram.resolved(total_bytes)
    extension.start_sim(vram_bytes, ram_bytes, wanted.min_storage, wanted.plan, wanted.verify, 0)


def _cuda_allocator(extension: ModuleType, wanted: config.Config):
    return extension.cuda_allocator(
        wanted.vram.encoded(),
        wanted.ram.encoded(),
        wanted.min_storage,
        wanted.plan,
        wanted.verify,
    )


def _finish(wanted: config.Config, device: str, extension: ModuleType) -> None:
    global _state
    state = State(wanted, device, extension, time.monotonic_ns())
    recorder = _record.make(wanted.report, state)
    _exit.install(extension, state.started_ns, recorder and recorder.finish)
    _step.install(extension, recorder and recorder.step)
    _edges.install(extension, device)
    _foreach.install(extension, device, wanted.late_updates)
    _state = state
    if wanted.activations not in ("auto", "off"):
        _spill.push(1.0 if wanted.activations == "all" else float(wanted.activations), min_bytes=0)
    if wanted.optimizer != "stock":
        _replace_optimizers()
    if wanted.log in ("info", "debug"):
        print(f"trainstream: on: device={device} {wanted}", file=sys.stderr, flush=True)


def _replace_optimizers() -> None:
    """Makes torch.optim's Adam and AdamW ours, for scripts that name them from now on.

    Ours are subclasses of them, so what asks for torch's class is content with ours.
    """
    from trainstream import optim

    for name, module in (("Adam", "adam"), ("AdamW", "adamw")):
        ours = getattr(optim, name)
        setattr(torch.optim, name, ours)
        setattr(sys.modules[f"torch.optim.{module}"], name, ours)
