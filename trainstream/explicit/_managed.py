"""Moves a model's memory to where trainstream manages it, keeping what shares memory together."""

from collections.abc import Iterable

import torch


def move(tensors: Iterable[torch.Tensor], device: torch.device, extension, min_storage: int) -> int:
    """Gives every tensor memory on `device` that the pager manages; its identity stays.

    Memory that trainstream manages already stays; memory made before it was switched on is
    copied. Tensors that share memory (tied or flat weights, views) go on sharing it.

    Args:
        tensors: Parameters, buffers, gradients and states. A tensor may come twice.
        device: "cpu" for the simulated device.
        extension: The module `trainstream._C`.
        min_storage: Bytes under which memory is not managed anyway.

    Returns:
        Bytes copied.
    """
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if not torch._C._has_storage(tensor):
            tensor.data = tensor.data.to(device)  # Such as sparse ones: torch knows how.
        elif not _is_there(tensor, device, extension, min_storage):
            sharing.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    moved_bytes = 0
    with torch.no_grad():
        while sharing:  # Each old memory is free before the next is copied.
            _, together = sharing.popitem()
            moved_bytes += _move_storage(together, device)
    return moved_bytes


def _is_there(tensor: torch.Tensor, device: torch.device, extension, min_storage: int) -> bool:
    here = tensor.device.type == device.type and (
        device.index is None or tensor.device.index == device.index
    )
    return here and (
        extension.is_managed(tensor) or tensor.untyped_storage().nbytes() < min_storage
    )


def _move_storage(together: list[torch.Tensor], device: torch.device) -> int:
    source = together[0].untyped_storage()
    old = torch.empty(0, dtype=torch.uint8, device=source.device).set_(source)
    new = torch.empty(source.nbytes(), dtype=torch.uint8, device=device).copy_(old)
    storage = new.untyped_storage()
    for tensor in together:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(storage, *place)
    return source.nbytes()
