"""`trainstream.memory_report()`: what takes memory now, by what it is and where it is.

The table of managed storages comes from the extension; their names come from the model and from the
optimizers that have made a step. Nothing is moved, pinned or announced by reading it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from trainstream import _step, _switch
from trainstream._text import format_bytes

KINDS = ("weights", "gradients", "optimizer", "activations", "other")
_HEADINGS = {
    "device": "device",
    "host_pinned": "host, locked",
    "host_pageable": "host, pageable",
    "host_copies": "host copies",  # Of what is on the device.
}
PLACES = tuple(_HEADINGS)
_BIGGEST = 10
_NAMES_SHOWN = 3


@dataclass
class _Storage:
    """One storage of the report.

    Args:
        kind: One of KINDS.
        place: Where its bytes are: one of PLACES but the last.
        size_bytes: Its bytes; a host copy of what is on the device comes on top.
        has_copy: The host has a copy of it too.
        pinned: It stays where it is for good.
        names: What the model and the optimizers call it; empty: they do not know it.
    """

    kind: str
    place: str
    size_bytes: int
    has_copy: bool = False
    pinned: bool = False
    names: list[str] = field(default_factory=list)

    def as_dict(self) -> dict:
        return {
            "names": self.names,
            "kind": self.kind,
            "place": self.place,
            "bytes": self.size_bytes,
            "pinned": self.pinned,
        }


@dataclass(frozen=True)
class _Named:
    """A tensor as the model or an optimizer calls it; `in_host_pool`: trainstream.optim's own."""

    kind: str
    name: str
    tensor: torch.Tensor
    in_host_pool: bool = False


def make(model: torch.nn.Module | None) -> dict:
    """The report as a dictionary; see trainstream.memory_report."""
    state = _switch.current()
    tensors = list(_named_tensors(model))
    storages = {} if state is None else _managed(state.extension, tensors)
    unknown = [storages.pop(key) for key in list(storages) if key < 0]  # No owner to name them by.
    for named in tensors:
        _add(storages, named, state)
    every = [*storages.values(), *unknown]
    totals = {kind: dict.fromkeys(PLACES, 0) for kind in KINDS}
    for storage in every:
        row = totals[storage.kind]
        row[storage.place] += storage.size_bytes
        row["host_copies"] += storage.size_bytes if storage.has_copy else 0
    on_device = sum(row["device"] for row in totals.values())
    totals["other"]["device"] += max(0, _all_gpus(torch.cuda.memory_allocated) - on_device)
    every.sort(key=lambda storage: (-storage.size_bytes, storage.names))
    return {
        "enabled": state is not None,
        "device": None if state is None else state.device,
        "now": totals,
        "total": {place: sum(row[place] for row in totals.values()) for place in PLACES},
        "peak": _peaks(state),
        "biggest": [storage.as_dict() for storage in every[:_BIGGEST]],
    }


def _managed(extension, tensors: list[_Named]) -> dict[int, _Storage]:
    """The managed storages by their owners' addresses; by numbers below 0 where none is known."""
    if not extension.is_watching():  # Then nobody says whose the younger ones are.
        plain = (_plain(named.tensor) for named in tensors)
        extension.note_owners([tensor for tensor in plain if tensor is not None])
    result = {}
    for index, entry in enumerate(extension.storages()):
        owner, size_bytes, cold, pinned, has_host, host_locked = entry
        place = ("host_pinned" if host_locked else "host_pageable") if cold else "device"
        # An owner is unknown until an operator has named it: workspaces stay so.
        kind = "activations" if owner else "other"
        has_copy = has_host and not cold
        result[owner or -1 - index] = _Storage(kind, place, size_bytes, has_copy, pinned)
    return result


def _add(storages: dict[int, _Storage], named: _Named, state) -> None:
    """Gives the storage of a tensor its kind and name; adds it where trainstream does not manage
    it. A second tensor of the same storage adds a name at most.
    """
    tensor = _plain(named.tensor)
    if tensor is None:
        return
    owner = tensor.untyped_storage()._cdata
    storage = storages.get(owner)
    if storage is None:
        place = _unmanaged_place(tensor, named.in_host_pool, state)
        if place is None:
            return
        size_bytes = tensor.untyped_storage().nbytes()
        storage = storages[owner] = _Storage(named.kind, place, size_bytes)
    if not storage.names:
        storage.kind = named.kind
    if storage.kind == named.kind and named.name not in storage.names:
        storage.names.append(named.name)


def _plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor whose memory it is; None where there is none, or it is that of several."""
    tensor = getattr(tensor, "_local_tensor", tensor)  # DTensor.
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    has_memory = torch._C._has_storage(tensor) and tensor.device.type != "meta"
    return tensor if has_memory and not wraps else None


def _unmanaged_place(tensor: torch.Tensor, in_host_pool: bool, state) -> str | None:
    """None: not counted. A simulated device's small tensors are torch's, beside all others."""
    if tensor.is_cuda:
        return "device"
    if state is not None and state.device == "sim":
        locked = state.extension.stats().get("pageable_bytes", 0) == 0
        return ("host_pinned" if locked else "host_pageable") if in_host_pool else None
    return "host_pinned" if tensor.is_pinned() else "host_pageable"


def _named_tensors(model: torch.nn.Module | None) -> Iterator[_Named]:
    """Weights first: a storage of two kinds counts as the first."""
    optimizers = _step.stepped_optimizers()
    weights = list(_weights(model))
    names = {tensor: name for name, tensor in reversed(weights)}
    for name, tensor in _params(optimizers):
        if tensor not in names:
            names[tensor] = name
            weights.append((name, tensor))
    yield from (_Named("weights", name, tensor) for name, tensor in weights)
    for tensor, name in names.items():
        if tensor.is_leaf and tensor.grad is not None:
            yield _Named("gradients", f"{name}.grad", tensor.grad)
    for optimizer in optimizers:
        yield from _states(optimizer, names)


def _weights(model: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    if model is not None:
        yield from model.named_parameters(remove_duplicate=False)
        yield from model.named_buffers(remove_duplicate=False)


def _params(optimizers: list) -> Iterator[tuple[str, torch.Tensor]]:
    """Of optimizers, by number: for those that the model does not name."""
    params = (p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"])
    for index, param in enumerate(params):
        yield f"parameter {index} {tuple(param.shape)}", param


def _states(optimizer, names: dict[torch.Tensor, str]) -> Iterator[_Named]:
    for param, state in optimizer.state.items():
        slot = getattr(optimizer, "_slots", {}).get(param)  # trainstream.optim's.
        beside = vars(slot) if slot is not None else {}
        for parts, in_host_pool in ((beside, True), (state, False)):
            for part, value in parts.items():
                if isinstance(value, torch.Tensor):
                    name = f"{names.get(param, 'a parameter')}: {part}"
                    yield _Named("optimizer", name, value, in_host_pool)


def _all_gpus(function: Callable[[int], int]) -> int:
    """Bytes of all GPUs, of a function of torch.cuda; 0 before CUDA has started."""
    started = torch.cuda.is_initialized()
    return sum(map(function, range(torch.cuda.device_count()))) if started else 0


def _peaks(state) -> dict[str, int]:
    """What is known of the most that there ever was, by place; not by kind."""
    if state is None:
        peak_bytes = _all_gpus(torch.cuda.max_memory_allocated)
        return {"device": peak_bytes} if peak_bytes else {}
    stats = state.extension.stats()
    return {
        name: stats[key]
        for name, key in (
            ("device", "peak_bytes"),
            ("host_in_use", "host_in_use_bytes_peak"),
            ("page_locked", "page_locked_bytes_peak"),
        )
        if key in stats  # Not in a forked child, whose device is its parent's.
    }


def as_text(report: dict) -> str:
    """The report as lines for a person."""
    head = f"trainstream: memory on {report['device']}"
    if not report["enabled"]:
        head = "trainstream is off: numbers are torch's and those of the model's tensors"
    rows = [(kind, *(report["now"][kind][place] for place in PLACES)) for kind in KINDS]
    rows.append(("total", *(report["total"][place] for place in PLACES)))
    lines = [head, _row("", *_HEADINGS.values())]
    lines += [_row(kind, *map(format_bytes, sizes)) for kind, *sizes in rows]
    peaks = ", ".join(f"{name} {format_bytes(size)}" for name, size in report["peak"].items())
    lines += [f"peak: {peaks or 'not known'}"]
    if report["biggest"]:
        lines.append("biggest:")
    for storage in report["biggest"]:
        name = _short(storage["names"]) or f"({storage['kind']})"
        size = format_bytes(storage["bytes"])
        lines.append(f"  {size:>12}  {_HEADINGS[storage['place']]:<14}  {name}")
    return "\n".join(lines)


def _short(names: list[str]) -> str:
    """Tied weights and views of one storage have several; a flat buffer has hundreds."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _row(name: str, *cells: str) -> str:
    return f"{name:<12}" + "".join(f"{cell:>16}" for cell in cells)
