"""Multi-tensor optimizer steps in pieces that fit.

torch.optim's foreach and fused functions take all parameters of a group at once. Foreach makes
temporaries as large as all of them, which no budget holds, so they are born in host memory; and
what one operator uses is pinned at once, so that nothing of it can make room. Every tensor's update
is its own, so calling the same function on pieces of its lists gives the same bits.
"""

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from types import ModuleType

import torch

from trainstream._late import LateUpdates

# A piece's parameters, gradients and states come to at most this part of the budget: temporaries,
# three times its parameters at most, and those of the operator before must have room beside it; and
# while one piece is computed, the states of the next come in and those of the last leave.
_PIECES_IN_BUDGET = 64

# Gradients of pieces that are made late come to at most this part of the budget. On an H200 a half
# gave the same step as a quarter; all of them left none of 18 GiB whole for the next logits (7.62 B
# parameters: 2.3 s a step with all, 1.91 s with a quarter, 1.96 s with none).
_LATE_IN_BUDGET = 4
# A larger piece is made at once.
_LATE_PIECES_IN_BUDGET = 8

# Read line by line in torch 2.11 and 2.15: no function of these passes a value from one parameter
# to another, but for what _must_stay_whole says. One that is not here is left alone.
_MODULES = (
    "adadelta",
    "_adafactor",
    "adagrad",
    "adam",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
)

# Lists whose tensors are scalars, or of another shape than their parameters.
_SCALAR_LISTS = {"state_steps", "mu_products", "mus", "etas"}
_FACTOR_LISTS = {"row_vars", "col_vars", "variances"}

_has_storage = torch._C._has_storage


class Counts:
    """How often torch's functions were called, and into how many calls that was split."""

    calls = 0
    pieces = 0


def install(extension: ModuleType, device: str, late_updates: bool = False) -> None:
    """Wraps the functions in torch.optim's modules. Called once for each process.

    Args:
        extension: The module `trainstream._C`.
        device: "sim" or "cuda": where the managed storages are.
        late_updates: Whether pieces of fused steps may be made once they are missed. Default False.
    """
    late = LateUpdates(extension) if late_updates else None
    for name in _MODULES:
        module = sys.modules.get(f"torch.optim.{name}")
        for kind in ("_multi_tensor_", "_fused_"):
            attribute = kind + name.lstrip("_")
            function = getattr(module, attribute, None)
            if function is not None and _lists_of(function)[:2] == ["params", "grads"]:
                device_type = "cpu" if device == "sim" else device
                ours = late if kind == "_fused_" else None
                setattr(module, attribute, _in_pieces(function, device_type, extension, ours))


def _lists_of(function: Callable) -> list[str]:
    """The names of the leading arguments that are lists; each is as long as `params`, or empty."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if "list[" not in str(parameter.annotation).lower():
            break
        names.append(parameter.name)
    return names


def _in_pieces(
    original: Callable, device_type: str, extension: ModuleType, late: LateUpdates | None
) -> Callable:
    names = _lists_of(original)
    fitting = _Known()
    quiet = _Quiet(original.__name__, extension)

    def in_pieces(*args, **kwargs):
        # The compiler fuses the whole list itself, and must see what it sees without us.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        Counts.calls += 1
        params = args[0] if len(args) >= len(names) else []
        ours = params and params[0].device.type == device_type
        if not ours or fitting.knows(params) or quiet.has_room_for(params):
            Counts.pieces += 1
            return original(*args, **kwargs)
        lists = dict(zip(names, args, strict=False))
        stats = extension.stats()
        budget_bytes = stats["budget_bytes"]
        pieces = _pieces(original.__name__, lists, kwargs, budget_bytes)
        if pieces is None:
            fitting.remember(params)
        if pieces is None or len(pieces) == 1:
            Counts.pieces += 1
            return original(*args, **kwargs)
        at_once = len(pieces)
        if late is not None:
            pieces, at_once = _late_ones(late, stats, lists, pieces)
        for number, piece in enumerate(pieces):
            Counts.pieces += 1
            parts = [[whole[i] for i in piece] if whole else [] for whole in lists.values()]
            with late if number >= at_once else contextlib.nullcontext():
                original(*parts, *args[len(names) :], **kwargs)
            for whole, part in zip(lists.values(), parts, strict=True):
                # SGD makes its momentum buffers here and expects them in the caller's list.
                for i, tensor in zip(piece, part, strict=False):
                    whole[i] = tensor

    return functools.wraps(original)(in_pieces)


class _Quiet:
    """Whether a step may be made as a whole because the run fits and nothing moves.

    Pieces cost time in the program (290 parameters take 5.0 ms of a core in 49 of them, 1.2 ms as a
    whole) in which the device may be idle, and a run that fits pays nothing. A fused step
    takes no memory. A foreach step does, and is made as a whole where three times its parameters
    have room within nine tenths of the budget beside all that the device held so far; a list with
    which the run became tight all the same stays in pieces.
    """

    def __init__(self, function: str, extension: ModuleType):
        self._is_fused = function.startswith("_fused_")
        self._extension = extension
        self._whole, self._tight = _Known(), _Known()

    def has_room_for(self, params: list[torch.Tensor]) -> bool:
        if self._extension.is_watching():
            if self._whole.knows(params):
                self._tight.remember(params)
            return False
        if self._is_fused:
            return True
        if self._tight.knows(params):
            return False
        if not self._whole.knows(params):
            if not self._fits(params):
                return False
            self._whole.remember(params)
        return True

    def _fits(self, params: list[torch.Tensor]) -> bool:
        stats = self._extension.stats()
        room_bytes = stats["budget_bytes"] * 9 // 10 - stats["resident_peak_bytes"]
        return 3 * sum(p.nbytes for p in params) <= room_bytes


class _Known:
    """Lists of which something was found, by their first parameter and length: a look-up a step.

    A list that is mistaken for another one costs speed at most.
    """

    def __init__(self):
        self._lengths: dict[int, tuple[weakref.ref, int]] = {}

    def knows(self, params: list[torch.Tensor]) -> bool:
        first, length = self._lengths.get(id(params[0]), (None, 0))
        return length == len(params) and first() is params[0]

    def remember(self, params: list[torch.Tensor]) -> None:
        if len(self._lengths) >= 256:
            self._lengths.clear()
        self._lengths[id(params[0])] = (weakref.ref(params[0]), len(params))


def _pieces(
    function: str, lists: dict[str, list], options: dict, budget_bytes: int
) -> list[list[int]] | None:
    """The indices of each piece, in the order to call; None where the whole fits."""
    params = lists["params"]
    everything = list(range(len(params)))
    if any(type(each) is not list or len(each) not in (0, len(params)) for each in lists.values()):
        return [everything]
    sizes = [_bytes_of(lists, i) for i in everything]
    groups: dict[object, list[int]] = {}
    for i in everything:
        groups.setdefault((params[i].device, params[i].dtype), []).append(i)
    # The budget is the sum over devices.
    limit_bytes = budget_bytes // _PIECES_IN_BUDGET // len({device for device, _ in groups})
    if sum(sizes) <= limit_bytes:
        return None
    if budget_bytes == 0 or _must_stay_whole(lists, options, len(groups)):
        return [everything]
    pieces = []
    for members in groups.values():
        if "_multi_tensor" in function and not _take_fast_route(function, lists, options, members):
            pieces.append(members)
        else:
            pieces += _cut(members, sizes, limit_bytes)
    return pieces


def _bytes_of(lists: dict[str, list], i: int) -> int:
    total = 0
    for name, tensors in lists.items():
        tensor = tensors[i] if tensors else None
        if tensor is None and tensors and name == "momentum_buffer_list":
            tensor = lists["grads"][i]  # It is about to be made.
        total += _nbytes(tensor)
    return total


def _nbytes(tensor: torch.Tensor | None) -> int:
    if tensor is None or tensor.layout is not torch.strided:
        return 0
    return getattr(tensor, "_local_tensor", tensor).nbytes


def _cut(members: list[int], sizes: list[int], limit_bytes: int) -> list[list[int]]:
    pieces, room = [], 0
    for i in members:
        if not pieces or sizes[i] > room:
            pieces.append([])
            room = limit_bytes
        pieces[-1].append(i)
        room -= sizes[i]
    return pieces


def _late_ones(
    late: LateUpdates, stats: dict[str, int], lists: dict[str, list], pieces: list[list[int]]
) -> tuple[list[list[int]], int]:
    """The pieces anew, and how many of them are to be made now; the others may be made late.

    Those that the next forward pass comes to last: it can hide what passes over the link while it
    computes, and no more, while gradients that wait take memory from it. A large vocabulary's are
    made at once: at the end of that pass, where its logits are made, memory is shortest.
    """
    budget_bytes = stats["budget_bytes"]
    left_bytes = late.left_bytes(stats["steps"], budget_bytes // _LATE_IN_BUDGET)
    written = [lists[name] for name in lists if lists[name] and name not in _SCALAR_LISTS]
    now, later, rest = [], [], []
    for piece in reversed(pieces):
        taken = []
        piece_bytes = sum(_bytes_of(lists, i) for i in piece)
        grad_bytes = sum(_nbytes(lists["grads"][i]) for i in piece)
        if piece_bytes <= budget_bytes // _LATE_PIECES_IN_BUDGET and grad_bytes <= left_bytes:
            taken = [i for i in piece if late.may_take([whole[i] for whole in written])]
        elif grad_bytes > left_bytes:
            left_bytes = 0  # What comes before it is used before it.
        if taken:
            left_bytes -= grad_bytes
            late.take(grad_bytes)
            later.append(taken)
            rest += [i for i in piece if i not in taken]  # Biases and the like, that stay.
        else:
            now.append(piece)
    now = [rest] * bool(rest) + now
    return [*reversed(now), *reversed(later)], len(now)


def _must_stay_whole(lists: dict[str, list], options: dict, group_count: int) -> bool:
    """Whether the list as a whole decides something, or two of its tensors share memory."""
    if "eps1" in options and options["eps1"] is None and group_count > 1:
        return True  # Adafactor takes the first group's dtype for all.
    buffers = lists.get("momentum_buffer_list", [])
    if len({buffer is None for buffer in buffers}) > 1:
        return True  # SGD asks whether all of them, or any, are there.
    # A parameter that is in the list twice, or tied by its memory, is updated in an order that
    # pieces would change.
    storages = [_memory(p)[0] for p in lists["params"] if p.numel()]
    places = [
        _memory(tensor)
        for tensors in lists.values()
        for tensor in tensors
        if tensor is not None and tensor.layout is torch.strided and tensor.numel()
    ]
    return len(set(storages)) < len(storages) or len(set(places)) < len(places)


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Which storage, and where in it."""
    inner = getattr(tensor, "_local_tensor", tensor)
    if not _has_storage(inner):
        return id(inner), 0
    return inner.untyped_storage()._cdata, inner.storage_offset()


def _take_fast_route(
    function: str, lists: dict[str, list], options: dict, members: list[int]
) -> bool:
    """Whether foreach operators surely take their fast route for these parameters.

    On a GPU one tensor of another dtype, shape or layout than its fellows sends the whole list
    along the slow route, one operator for each tensor, whose rounding differs (it multiplies by a
    reciprocal where the fast one divides). Pieces without that tensor would not follow it.
    """
    params = lists["params"]
    is_factored = not _FACTOR_LISTS.isdisjoint(lists)
    shaped = [
        tensors
        for name, tensors in lists.items()
        if tensors and name not in _SCALAR_LISTS | _FACTOR_LISTS
    ]
    for i in members:
        # Adafactor makes temporaries of its own layout.
        if not (params[i].is_contiguous() if is_factored else _is_dense(params[i])):
            return False
        if not all(_is_like(tensors[i], params[i]) for tensors in shaped):
            return False
    # Here tensors meet scalar tensors in one operator: of one shape where the parameter is one.
    if options.get("capturable") or "asgd" in function:
        return len({params[i].dim() == 0 for i in members}) == 1
    return True


def _is_like(tensor: torch.Tensor | None, param: torch.Tensor) -> bool:
    return tensor is None or (
        tensor.layout is torch.strided
        and tensor.dtype == param.dtype
        and tensor.shape == param.shape
        and tensor.stride() == param.stride()
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether it fills its memory without gaps or overlaps, in any order of its dimensions."""
    if tensor.is_contiguous():
        return True
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()
