"""Budgets, and which blocks of a model stay on the device: for code that moves blocks itself.

Thin: sizes are read here, the planning is csrc/pager/memory_planner.h. Imports no torch.
"""

import math
import numbers
from collections.abc import Iterable, Sequence

from trainstream import config, errors

_BYTES_MAX = 2**62  # As in config: the extension takes 64-bit integers with a sign.
_BYTES_ALLOWED = "bytes from 0 on, or a size such as 550MiB"


class Budget:
    """The device and host memory that a run may use.

    Args:
        vram: Device memory: bytes, a size ("24GiB"), a percent of the GPU's ("40%"), or "auto":
            trainstream's own budget where it is on, else what the GPU has free, less a reserve.
            Default "auto".
        ram: Host memory, likewise; "auto" is what the system and its cgroup can spare. Default
            "auto".
        check_memory: False refuses nothing, and the run shows whether it fits. Default True.

    Attributes:
        device_bytes, host_bytes: The same in bytes.

    Raises:
        ConfigError: A value is not allowed, or a share of a GPU is asked for where there is none.
        TrainstreamError: The extension is missing or built for another torch.
    """

    def __init__(self, vram: object = "auto", ram: object = "auto", *, check_memory: bool = True):
        wanted = config.with_keywords(config.Config(), {"vram": vram, "ram": ram})
        extension = _extension()
        self._core = extension.Budget(
            wanted.vram.size_bytes or _device_share(extension, wanted.vram),
            extension.host_limit_bytes(wanted.ram.encoded()),
            bool(check_memory),
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory."""
        return self._core.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return self._core.host_bytes

    @property
    def check_memory(self) -> bool:
        """Whether a run that cannot fit is refused."""
        return self._core.check_memory

    def check(
        self, *, fixed: object = 0, resident: object = 0, inflight: object = 0, paged: object = 0
    ) -> None:
        """Refuses a run that cannot fit. Nothing happens with `check_memory=False`.

        Args:
            fixed: Device bytes outside the blocks, there all the time. Default 0.
            resident: Device bytes of the blocks that stay. Default 0.
            inflight: Device bytes of frames for paged blocks on their way. Default 0.
            paged: Host bytes of the paged blocks. Default 0.
            Each is a number of bytes or a size such as "3GiB".

        Raises:
            BudgetError: Their sum is more than there is; a MemoryError. The message has every term.
            ValueError: One of them is no size.
        """
        terms = {"fixed": fixed, "resident": resident, "inflight": inflight, "paged": paged}
        self._core.check(*(_bytes(name, value) for name, value in terms.items()))

    def __repr__(self) -> str:
        return (
            f"Budget(vram={self.device_bytes}, ram={self.host_bytes}, "
            f"check_memory={self.check_memory})"
        )


class MemoryPlanner:
    """Which blocks (layers) of a model are paged: from an estimate, then from measured peaks.

        planner = MemoryPlanner(Budget(vram="24GiB"), [layer_bytes] * 48, fixed_vram="3GiB")
        paged = planner.initial_paged()
        while not planner.done:
            peak = run_a_step(paged)
            paged = planner.refine(peak, paged)

    A plan keeps as many bytes on the device as nine tenths of the budget hold, and spreads the
    paged blocks evenly, so that their loads are evenly spaced in time. A later peak over that, even
    after `done`, pages more; what was needed once is kept room for, so plans never oscillate.

    Args:
        budget: What may be used.
        block_bytes: Bytes of each block; or of every one, with `blocks`.
        fixed_vram: An estimate of the device bytes outside the blocks and their frames. Better too
            high: headroom is measured. Default 0.
        inflight_bytes: Frames for paged blocks on their way; where there is no room for so many, as
            many as there is room for, but at least one block's. Default two of the largest blocks.
        blocks: How many blocks, where `block_bytes` is one number. Default None.
        Bytes are numbers, rounded up, or sizes such as "550MiB".

    Raises:
        BudgetError: No set of blocks fits. The message has the arithmetic.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        budget: Budget,
        block_bytes: object,
        fixed_vram: object = 0,
        inflight_bytes: object = None,
        *,
        blocks: int | None = None,
    ):
        if not isinstance(budget, Budget):
            raise errors.bad_argument("budget", budget, "a trainstream.Budget")
        self.budget = budget
        self._core = _extension().MemoryPlanner(
            budget._core,
            _block_list(block_bytes, blocks),
            _bytes("fixed_vram", fixed_vram),
            None if inflight_bytes is None else _bytes("inflight_bytes", inflight_bytes),
        )

    def initial_paged(self) -> list[int]:
        """Indices of the blocks to page at first, rising."""
        return self._core.initial_paged()

    def refine(self, peak: object, paged: Iterable[int]) -> list[int]:
        """The blocks to page after a step has shown its peak.

        Args:
            peak: Most device bytes in use at once during that step, such as
                torch.cuda.max_memory_allocated(). Better not the first step's, which ends before
                the optimizer's states take part.
            paged: The indices that were paged in it.

        Returns:
            Rising indices: more than before where the peak was over nine tenths of the budget,
            fewer (half of what the headroom allows at a time) where it was under.

        Raises:
            ValueError: `peak` is no size, or an index is not one of a block.
        """
        return self._core.refine(_bytes("peak", peak), self._indices(paged))

    @property
    def done(self) -> bool:
        """Whether the last peak changed nothing. False before the first; a later one may."""
        return self._core.done

    @property
    def inflight_bytes(self) -> int:
        """Bytes of frames that the plan has room for."""
        return self._core.inflight_bytes

    def device_bytes(self, paged: Iterable[int]) -> int:
        """Device bytes that a step is expected to need at its peak while `paged` are paged."""
        return self._core.device_bytes(self._indices(paged))

    @staticmethod
    def spread(k: int, items: Sequence) -> list:
        """`k` of `items`, evenly spaced in their order; always the same ones.

        Raises:
            ValueError: `k` is not from 0 to len(items).
        """
        if not 0 <= k <= len(items):
            raise errors.bad_argument("k", k, f"0 to {len(items)}, the number of items")
        return [items[position] for position in _extension().spread(k, len(items))]

    @staticmethod
    def _indices(paged: Iterable[int]) -> list[int]:
        indices = sorted(int(index) for index in paged)
        if indices and indices[0] < 0:
            raise errors.bad_argument("paged", indices[0], "indices of blocks, from 0 on")
        return indices


def _extension():
    from trainstream import _switch

    return _switch.load_extension()


def _device_share(extension, vram: config.Amount) -> int:
    """Bytes of "auto" or a percent. Starts CUDA where trainstream does not manage it already."""
    import torch

    from trainstream import _switch

    state = _switch.current()
    managed = state.extension.stats().get("budget_bytes", 0) if state is not None else 0
    if managed and not vram.percent:
        return managed
    if not torch.cuda.is_available():
        raise errors.share_of_no_gpu(vram)
    return extension.device_limit_bytes(vram.encoded(), *torch.cuda.mem_get_info())


def _bytes(name: str, value: object) -> int:
    size_bytes = None
    if isinstance(value, str):
        size_bytes = config.parse_size(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        size_bytes = math.ceil(value)
    if size_bytes is None or not 0 <= size_bytes <= _BYTES_MAX:
        raise errors.bad_argument(name, value, _BYTES_ALLOWED)
    return size_bytes


def _block_list(block_bytes: object, blocks: int | None) -> list[int]:
    if isinstance(block_bytes, (str, numbers.Real)):
        if not isinstance(blocks, int) or blocks < 1:
            raise errors.bad_argument("blocks", blocks, "how many blocks have block_bytes, from 1")
        block_bytes = [block_bytes] * blocks
    elif blocks is not None:
        raise errors.bad_argument("blocks", blocks, "None, as block_bytes lists every block")
    sizes = [_bytes("block_bytes", value) for value in block_bytes]
    if not sizes or min(sizes) == 0 or sum(sizes) > _BYTES_MAX:
        raise errors.bad_argument("block_bytes", block_bytes, "at least one block, each of bytes")
    return sizes
