"""Activations on their way to host memory and back: torch's hooks around a forward pass.

The hooks hint, nothing more: what is saved keeps its storage, and any storage may be cold at any
time. So they may be left out wherever something else has to be asked, and are.
"""

import functools
import inspect
import threading
from collections.abc import Callable

import torch

from trainstream import config, errors

# torch's own names for them; public is only a context manager that would nest around others' hooks.
_hooks = torch._C._autograd

# The share as the extension takes it: any below 0 is by need.
_BY_NEED = -1.0


class SpillActivations:
    """See trainstream.spill_activations.

    Args:
        share: As share_of() gives it.
        min_bytes: Storages under this many bytes stay.
    """

    def __init__(self, share: float, min_bytes: int):
        self.share, self.min_bytes = share, min_bytes
        # For each thread, whether each of its entries has put hooks in place.
        self._entries: dict[int, list[bool]] = {}

    def __enter__(self) -> "SpillActivations":
        # A compiler that traces this sees a context that does nothing: the hooks are for what runs.
        if not torch.compiler.is_compiling():
            entries = self._entries.setdefault(threading.get_ident(), [])
            entries.append(push(self.share, self.min_bytes))
        return self

    def __exit__(self, *exception: object) -> None:
        if torch.compiler.is_compiling():
            return
        entries = self._entries.get(threading.get_ident(), [])
        if entries and entries.pop():
            _hooks._pop_saved_tensors_default_hooks()
        if not entries:
            self._entries.pop(threading.get_ident(), None)

    def __call__(self, function: Callable) -> Callable:
        returns_later = inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(
            function
        )
        if not callable(function) or returns_later:
            raise errors.not_a_forward(function)

        @functools.wraps(function)
        def spilling(*args, **kwargs):
            with SpillActivations(self.share, self.min_bytes):
                return function(*args, **kwargs)

        return spilling


def make(share: float | str, min_size: int | str | None) -> SpillActivations:
    """What trainstream.spill_activations returns.

    Raises:
        ValueError: An argument is none of those allowed.
    """
    return SpillActivations(share_of(share), _bytes_of(min_size))


def push(share: float, min_bytes: int) -> bool:
    """Puts hooks on this thread's stack; False where they would be in others' way.

    Args:
        share: Of the bytes saved, 0 to 1; below 0: by need.
        min_bytes: Storages under this many bytes stay.
    """
    from trainstream import _switch

    state = _switch.current()
    if state is None or not _hooks._saved_tensors_hooks_is_enabled():
        return False
    # torch asks the innermost hooks only. The user's, and checkpoint's, decide what is saved.
    top = _hooks._top_saved_tensors_default_hooks(True)
    if top is not None and not isinstance(
        getattr(top[0], "__self__", None), state.extension.SpillHooks
    ):
        return False
    hooks = state.extension.SpillHooks(share, min_bytes)
    _hooks._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    return True


def share_of(share: float | str) -> float:
    """As the extension takes it.

    Raises:
        ValueError: It is neither "auto" nor a number from 0 to 1.
    """
    if share == "auto":
        return _BY_NEED
    if isinstance(share, int | float) and not isinstance(share, bool):
        if 0 <= share <= 1:
            return float(share)
    raise errors.bad_argument("share", share, "auto, or a number from 0 to 1")


def _bytes_of(min_size: int | str | None) -> int:
    if min_size is None or (isinstance(min_size, int) and min_size == 0):
        return 0
    size_bytes = None
    if isinstance(min_size, int | str) and not isinstance(min_size, bool):
        size_bytes = config.parse_size(str(min_size))
    if size_bytes is None:
        raise errors.bad_argument("min_size", min_size, f"None, 0, or {config.SIZE_ALLOWED}")
    return size_bytes
