"""Which blocks are paged: told to the pager, which moves them."""

import weakref
from collections.abc import Iterable

import torch

from trainstream import errors
from trainstream.explicit._blocks import Block, storage_bytes
from trainstream.explicit._needs import Needs


class BlockPager:
    """Pages and unpages the blocks of a model. Owner: the session.

    A paged block's weights, gradients and (with a stock optimizer) states are in host memory; they
    come to the device for their use, or a little before, and leave after it. Arithmetic stays as it
    is, so any block may be paged or unpaged at any time outside of backward.

    Args:
        blocks: As found in the model.
        extension: The module `trainstream._C`.
        needs: What a parameter needs beside its weight.
    """

    def __init__(self, blocks: list[Block], extension, needs: Needs):
        self._blocks = blocks
        self._extension = extension
        self._needs = needs
        self._hooks: dict[int, list] = {}  # Of the paged blocks.
        self._with_states: set[int] = set()  # Of those: their states are paged too.
        self._moves = {"pages": 0, "unpages": 0}
        self._before = dict(extension.stats())

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def blocks(self) -> list[Block]:
        """The blocks, in the model's order."""
        return list(self._blocks)

    @property
    def names(self) -> list[str]:
        """The blocks' paths in the model."""
        return [block.name for block in self._blocks]

    @property
    def paged(self) -> list[int]:
        """Indices of the paged blocks, rising."""
        return sorted(self._hooks)

    @property
    def block_bytes(self) -> list[int]:
        """What paging each block takes off the device: its weights and buffers; gradients, of those
        that train, while they wait for the step; states, with a stock optimizer."""
        return [self._bytes_of(block) for block in self._blocks]

    @property
    def bytes_paged(self) -> int:
        """The sum of that over the paged blocks."""
        sizes = self.block_bytes
        return sum(sizes[index] for index in self._hooks)

    @property
    def stats(self) -> dict[str, int]:
        """Blocks and calls; and since wrap() what the pager copied each way, dropped without a copy
        and loaded ahead of need, in bytes."""
        now = self._extension.stats()
        names = ("evicted_bytes", "restored_bytes", "dropped_bytes", "in_place_bytes")
        return {
            "blocks": len(self._blocks),
            "paged": len(self._hooks),
            "bytes_paged": self.bytes_paged,
            **self._moves,
            **{n: now[n] - self._before.get(n, 0) for n in (*names, "loaded_ahead_bytes")},
        }

    def page(self, index: int) -> None:
        """Block `index` belongs out: it leaves now, and after each use. Nothing happens to a block
        that is paged already.

        Raises:
            ValueError: There is no such block.
        """
        block = self._block(index)
        if index in self._hooks:
            return
        self._hooks[index] = self._watch_gradients(block)
        self._extension.page([*block.tensors, *_gradients(block)])
        self.note_states(index)
        self._moves["pages"] += 1

    def unpage(self, index: int) -> None:
        """Block `index` is brought in, as far as there is room, and has no copy on the host.

        Raises:
            ValueError: There is no such block.
        """
        block = self._block(index)
        if index not in self._hooks:
            return
        for hook in self._hooks.pop(index):
            hook.remove()
        self._with_states.discard(index)
        self._extension.unpage([*block.tensors, *_gradients(block), *self._states(block)])
        self._moves["unpages"] += 1

    def set(self, paged: Iterable[int]) -> None:
        """Exactly these are paged from now on. Out first: what comes in needs their room."""
        wanted = set(paged)
        for index in wanted.difference(self._hooks):
            self.page(index)
        for index in set(self._hooks).difference(wanted):
            self.unpage(index)

    def note_states(self, index: int | None = None) -> None:
        """States that a stock optimizer has made since belong to their blocks. All paged blocks'
        without an index."""
        for i in self._hooks if index is None else [index]:
            states = [] if i in self._with_states else self._states(self._blocks[i])
            if states:
                self._extension.page(states)
                self._with_states.add(i)

    def bring_in(self, tensors: list[torch.Tensor]) -> None:
        """Brings in tensors outside the blocks, as unpage() does."""
        self._extension.unpage(tensors)

    def _block(self, index: int) -> Block:
        if isinstance(index, bool) or not isinstance(index, int):
            raise errors.bad_argument("the index of a block", index, "a whole number")
        if not 0 <= index < len(self._blocks):
            allowed = f"0 to {len(self._blocks) - 1}" if self._blocks else "none: no blocks"
            raise errors.bad_argument("the index of a block", index, allowed)
        return self._blocks[index]

    def _bytes_of(self, block: Block) -> int:
        return storage_bytes(block.tensors) + self._needs.beside_bytes(block.params)

    def _states(self, block: Block) -> list[torch.Tensor]:
        return [state for param in block.params for state in self._needs.states(param)]

    def _watch_gradients(self, block: Block) -> list:
        # Weakly: it knows the optimizer, and a parameter that its own hook leads to is never freed.
        page, known = self._extension.page, weakref.ref(self._needs)

        def made(param: torch.Tensor) -> None:
            needs = known()
            # Early updates take them, before or after this.
            if param.grad is not None and (needs is None or needs.keeps_gradients):
                page([param.grad])

        training = [p for p in block.params if p.requires_grad]
        return [p.register_post_accumulate_grad_hook(made) for p in training]


def _gradients(block: Block) -> list[torch.Tensor]:
    return [p.grad for p in block.params if p.grad is not None]
