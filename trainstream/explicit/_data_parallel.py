"""Data parallel training over a process group: gradients averaged before each step.

Where the group has NCCL and the gradients are on a GPU, there; else in host memory, over gloo.
Everything goes through one buffer: torch's collectives keep addresses, and memory whose address is
kept can never move.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from trainstream import errors

# As DistributedDataParallel's buckets: large enough for the link, small beside a budget.
_BUFFER_BYTES_MAX = 25 * 2**20
_BUFFER_PART = 64  # Of the budget, at most, where the buffer is on the device.


class DataParallel:
    """Averages gradients over the default process group. Owner: the session. Lock: none; every rank
    calls the same methods in the same order.

    Args:
        device: Of the gradients.
        extension: The module `trainstream._C`.
    """

    def __init__(self, device: torch.device, extension):
        self.world_size = dist.get_world_size()
        # Groups made without a backend have one for each kind of device.
        backends = f"{dist.get_backend()} {dist.get_backend_config()}"
        self.on_device = device.type == "cuda" and "nccl" in backends
        budget_bytes = extension.stats()["budget_bytes"]
        size_bytes = min(_BUFFER_BYTES_MAX, max(budget_bytes // _BUFFER_PART, 2**16))
        self._buffer = torch.empty(size_bytes // 8, dtype=torch.float64, device=device)
        if not self.on_device:
            self._buffer = extension.zeros_on_host(self._buffer, torch.float64)

    @torch.no_grad()
    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Every rank gets the bytes of rank 0.

        Raises:
            RuntimeError: The ranks' tensors are not alike.
        """
        self._check_alike(tensors)
        flats = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        pieces = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in flats.values()
        ]
        for bucket, buffer in self._buckets(pieces, torch.uint8):
            self._exchange(bucket, buffer, lambda: dist.broadcast(buffer, 0))  # noqa: B023

    @torch.no_grad()
    def average(self, params: list[torch.Tensor]) -> None:
        """Each gradient becomes the mean over the ranks. A parameter that has a gradient on some
        rank has one on all afterwards, missing ones count as zeros; one that has none keeps none.

        Raises:
            RuntimeError: A gradient is sparse.
        """
        params = self._with_gradients(params)
        for dtype in (torch.float32, torch.float64):
            grads = [p.grad for p in params if (p.dtype is torch.float64) == (dtype.itemsize == 8)]
            flats = [grad.contiguous().view(-1) for grad in grads]
            for bucket, buffer in self._buckets(flats, dtype):
                self._exchange(bucket, buffer, lambda: self._mean(buffer))  # noqa: B023
            for grad, flat in zip(grads, flats, strict=True):
                if not grad.is_contiguous():
                    grad.copy_(flat.view(grad.shape))

    def _mean(self, buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer)
        buffer /= self.world_size

    def _exchange(self, bucket, buffer: torch.Tensor, collective) -> None:
        """Puts the pieces of `bucket` into the buffer, and back what the collective made there."""
        pieces = buffer.split([piece.numel() for piece in bucket])
        for ours, piece in zip(pieces, bucket, strict=True):
            ours.copy_(piece)
        collective()
        for ours, piece in zip(pieces, bucket, strict=True):
            piece.copy_(ours)

    def _buckets(
        self, flats: Iterable[torch.Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
        """Lists of pieces that fill the buffer, in order, with the part of the buffer they fill."""
        whole = self._buffer.view(dtype)
        bucket, used = [], 0
        for flat in flats:
            while flat.numel() > 0:
                piece = flat[: whole.numel() - used]
                flat = flat[piece.numel() :]
                bucket.append(piece)
                used += piece.numel()
                if used == whole.numel():
                    yield bucket, whole
                    bucket, used = [], 0
        if bucket:
            yield bucket, whole[:used]

    def _with_gradients(self, params: list[torch.Tensor]) -> list[torch.Tensor]:
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params):
            raise errors.sparse_average()
        flags = self._small([p.grad is not None for p in params])
        dist.all_reduce(flags)
        wanted = [p for p, count in zip(params, flags.tolist(), strict=True) if count > 0]
        for param in wanted:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return wanted

    def _check_alike(self, tensors: list[torch.Tensor]) -> None:
        ours = [len(tensors), sum(t.numel() for t in tensors)]
        most, least = self._small(ours), self._small(ours)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        if most.tolist() != least.tolist():
            raise errors.ranks_differ(ours, least.tolist(), most.tolist())

    def _small(self, values: list) -> torch.Tensor:
        device = self._buffer.device if self.on_device else "cpu"
        return torch.tensor([int(value) for value in values], dtype=torch.int64, device=device)


def why_serial(model: nn.Module, distributed: object) -> str:
    """Why nothing is to be averaged; "" where it is.

    Args:
        distributed: As wrap() takes it.

    Raises:
        TrainstreamError: `distributed` is True and there is no process group.
    """
    if distributed is False:
        return "distributed=False"
    if not dist.is_available() or not dist.is_initialized():
        if distributed is True:
            raise errors.no_process_group()
        return "there is no process group"
    if dist.get_world_size() == 1 and distributed == "auto":
        return "the process group has one rank"
    kind = type(model).__name__
    if kind in ("DistributedDataParallel", "FullyShardedDataParallel"):
        return f"{kind} exchanges gradients itself"
    plain = torch.Tensor.__torch_dispatch__
    if any(type(p).__torch_dispatch__ is not plain for p in model.parameters()):
        return "the parameters are sharded already"
    return ""
