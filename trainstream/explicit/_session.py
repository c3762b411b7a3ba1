"""A wrapped model: what was decided for it, and what is decided after each step."""

import weakref

import torch
from torch import nn

from trainstream import errors
from trainstream._progress import Progress
from trainstream.explicit import _blocks, _data_parallel, _managed, _needs
from trainstream.explicit._block_pager import BlockPager
from trainstream.explicit._events import EventLog
from trainstream.explicit._gradients import Gradients
from trainstream.explicit._options import Options, torch_device
from trainstream.explicit._spilling import Spilling
from trainstream.optim import _convert
from trainstream.planner import Budget, MemoryPlanner

# Of the device, as MemoryPlanner has it: the rest is for what is not seen, such as fragments.
_USABLE = 0.9
# Steps after which `offload="auto"` is settled: the first ends before the states take part.
_MEASURED_STEPS = 2


class Session:
    """What `trainstream.wrap` set up for one model; `trainstream.session(model)` returns it.

    Owner: the table of wrapped models, for as long as the model lives; it knows the model weakly.
    Lock: none; it works between steps, on the thread that makes them.

    Attributes:
        pager: A BlockPager: which blocks are paged.
        planner: The MemoryPlanner that decides so by measured peaks; None where the caller did.
        optimizer: The optimizer; the same object as was given.
        events: What was decided and why, in order: each has step, seconds, what, why, numbers.
    """

    def __init__(self, model: nn.Module, optimizer, options: Options, state):
        self.events = EventLog()
        self.optimizer = optimizer
        self.planner: MemoryPlanner | None = None
        self._model = weakref.ref(model)
        self._options = options
        self._extension = state.extension
        self._min_storage = state.config.min_storage
        self._device = torch_device(options.device, state.device)
        self._place = state.device
        self._budget = _budget_of(state, options.check_memory)
        self._needs = _needs.Needs(optimizer)
        self._was_host = _convert.is_host(optimizer)
        self._clip_norm, self._steps = _clipping_and_steps(options, optimizer)
        self._offload_settled = True
        self._hooks: list = []
        self._gradients = Gradients(optimizer, self._clip_norm)
        self._peak_bytes = 0  # Of the measured steps.
        self.pager = BlockPager(_blocks.find(model, options.blocks), self._extension, self._needs)

    # --- Setting up ---

    def start(self) -> None:
        """Decides, checks, then changes: what is refused has changed nothing.

        Raises:
            BudgetError: It does not fit. ValueError: An option does not fit the model.
        """
        serial = _data_parallel.why_serial(self._model(), self._options.distributed)
        share = self._options.activation_offload
        spilling = None if share in ("auto", False) else Spilling(float(share))
        self._choose_optimizer(distributed=not serial)
        paged = self._choose_paged()
        moments = self._check_memory(paged)
        self._move(paged)
        if self.optimizer is not None and self._needs.on_host:
            self._to_host(moments)
        self._start_gradients(serial)
        if spilling is not None:
            self._hooks += spilling.watch(self._model())
        if self.optimizer is not None:
            self._hooks.append(self.optimizer.register_step_post_hook(self._after_step))
        self._extension.take_peak()

    def _choose_optimizer(self, distributed: bool) -> None:
        """Where the optimizer's states are to be, at first."""
        options, optimizer = self._options, self.optimizer
        self._needs.on_host = self._was_host
        if optimizer is None or (options.offload is False and not self._was_host):
            return
        reason = _convert.why_not(optimizer)
        if reason and options.offload is True:
            raise errors.not_taken_over(reason)
        if reason:
            self.events.add("optimizer", f"stock: {reason}")
            return
        early = self._steps is not None and self._clip_norm is None
        self._needs.keeps_gradients = not early or distributed
        asked = options.offload is True or self._was_host
        if asked or options.moment_dtype != "auto" or self._steps is not None:
            self._needs.on_host = True
            return
        self._offload_settled = False
        need_bytes = self._fixed_bytes() + sum(self.pager.block_bytes)
        need_bytes += _needs.activations_guess(self._budget.device_bytes)
        fits = need_bytes <= _USABLE * self._budget.device_bytes
        self._needs.on_host = not fits
        where = "stock: all is expected to fit" if fits else "in host memory: not all would fit"
        self.events.add(
            "optimizer",
            f"{where}; to be settled after {_MEASURED_STEPS} measured steps",
            expected=need_bytes,
            budget=self._budget.device_bytes,
        )

    def _fixed_bytes(self) -> int:
        """Device bytes outside the blocks, without what a step makes."""
        model = self._model()
        every = [*model.parameters(), *model.buffers()]
        weights = _blocks.storage_bytes(_with_storage(every))
        whole = weights + self._needs.beside_bytes(model.parameters())
        return max(0, whole - sum(self.pager.block_bytes))

    def _room_bytes(self) -> int:
        """Device memory for paged blocks: the one in use, and those on their way."""
        sizes = self.pager.block_bytes
        return (1 + self._options.prefetch_depth) * max(sizes, default=0)

    def _choose_paged(self) -> list[int]:
        count = len(self.pager)
        paged = self._options.paged_blocks(count)
        if count == 0:
            if self._options.blocks is not None or self._options.param_offload not in (
                "auto",
                False,
            ):
                raise errors.no_blocks()
            self.events.add("blocks", "none were found; the pager moves what is coldest")
            return []
        names = self.pager.names
        self.events.add("blocks", f"{count} from {names[0]} to {names[-1]}", blocks=count)
        if paged is not None:
            self.events.add("plan", "the caller chose the paged blocks", paged=paged)
            return paged
        guess = _needs.activations_guess(self._budget.device_bytes)
        try:
            self.planner = self._make_planner(self._fixed_bytes() + guess)
        except errors.BudgetError:  # The guess may be what is too much.
            self.planner = self._make_planner(self._fixed_bytes())
        paged = self.planner.initial_paged()
        self.events.add(
            "plan",
            "estimated, to be measured" if paged else "all blocks are expected to fit",
            paged=paged,
            expected=self.planner.device_bytes(paged),
            budget=self._budget.device_bytes,
        )
        return paged

    def _make_planner(self, fixed_bytes: int, check_memory: bool = True) -> MemoryPlanner:
        budget = self._budget
        if not check_memory:
            budget = Budget(budget.device_bytes, budget.host_bytes, check_memory=False)
        return MemoryPlanner(budget, self.pager.block_bytes, fixed_bytes, self._room_bytes())

    def _check_memory(self, paged: list[int]) -> str:
        """The moments' type. Raises BudgetError where something does not fit."""
        sizes = self.pager.block_bytes
        paged_bytes = sum(sizes[i] for i in paged)
        if self.planner is None and sizes:  # The caller's choice: nobody has done the sum.
            self._budget.check(
                fixed=self._fixed_bytes(),
                resident=sum(sizes) - paged_bytes,
                inflight=min(self._room_bytes(), paged_bytes),
            )
        host_bytes, check = self._budget.host_bytes, self._options.check_memory
        if not self._needs.on_host:
            if check:
                _needs.check_host({}, paged_bytes, host_bytes)
            return "auto"
        if self._was_host:
            return self._options.moment_dtype
        wanted = self._options.moment_dtype
        return _needs.choose_moments(wanted, self._needs, paged_bytes, host_bytes, check)

    def _move(self, paged: list[int]) -> None:
        """Outside first, then block by block, each paged before the next comes."""
        self._extension.set_paged_room(self._room_bytes())
        states = []
        if not self._needs.on_host:
            states = [s for p in self._model().parameters() for s in self._needs.states(p)]
        pieces = [self._outside(), *(block.tensors for block in self.pager.blocks), states]
        total_bytes = sum(_blocks.storage_bytes(_with_storage(piece)) for piece in pieces)
        moved_bytes = 0
        with Progress("moving the model", total_bytes) as progress:
            for index, piece in enumerate(pieces):
                moved_bytes += self._move_tensors(_with_gradients(piece))
                progress.add(_blocks.storage_bytes(_with_storage(piece)))
                if index - 1 in paged:
                    self.pager.page(index - 1)
        self.pager.note_states()
        self._extension.set_paged_room(self._room_bytes())  # Now that there is a pager.
        if moved_bytes:
            self.events.add("moved", f"to {self._place}", bytes=moved_bytes)

    def _outside(self) -> list[torch.Tensor]:
        model = self._model()
        inside = {id(t) for block in self.pager.blocks for t in block.tensors}
        return [t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside]

    def _move_tensors(self, tensors) -> int:
        return _managed.move(tensors, self._device, self._extension, self._min_storage)

    def _to_host(self, moments: str) -> None:
        early = None if self._needs.keeps_gradients else self._steps
        _convert.to_host(
            self.optimizer,
            moments=moments,
            max_grad_norm=self._clip_norm,
            accumulation_steps=early,
        )
        if self._steps is not None and early is None:
            self.events.add(
                "optimizer", "updates wait for step(): gradients are averaged or clipped first"
            )
        self.events.add(
            "optimizer",
            f"in host memory with {moments} moments",
            host=self._budget.host_bytes,
        )

    def _start_gradients(self, serial: str) -> None:
        """`serial`: why they are not averaged over ranks; "" where they are."""
        if serial:
            self.events.add("distributed", f"off: {serial}")
        else:
            parallel = _data_parallel.DataParallel(self._device, self._extension)
            model = self._model()
            parallel.broadcast([*model.parameters(), *model.buffers()])
            self._gradients.parallel = parallel
            where = "on the device" if parallel.on_device else "in host memory"
            ranks = parallel.world_size
            self.events.add("distributed", f"gradients are averaged {where}", ranks=ranks)
        if self.optimizer is not None:
            self._hooks.append(self._gradients.watch())

    # --- Each step ---

    def _after_step(self, optimizer, args, kwargs) -> None:
        self.events.step += 1
        peak_bytes, pressed_bytes = self._extension.take_peak()
        self.pager.note_states()
        if self.events.step == 1 or self._model() is None:
            return  # The first made the states, and ended before they took part.
        if pressed_bytes:  # More was needed than there was.
            peak_bytes = max(peak_bytes, self._budget.device_bytes)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        if self.planner is not None:
            self._refine(peak_bytes, pressed_bytes)
        if not self._offload_settled and self.events.step > _MEASURED_STEPS:
            self._settle_offload()
        self._extension.take_peak()  # What was moved just now is no part of a step.

    def _refine(self, peak_bytes: int, pressed_bytes: int) -> None:
        was_done, before = self.planner.done, self.pager.paged
        limit_bytes = _USABLE * self._budget.device_bytes
        if was_done and peak_bytes <= limit_bytes:
            return
        paged = self.planner.refine(peak_bytes, before)
        numbers = {"peak": peak_bytes, "pressed": pressed_bytes, "paged": paged}
        if was_done and paged != before:
            more = len(paged) - len(before)
            self.events.add("watchdog", f"a step grew: {more} more blocks are paged", **numbers)
        elif paged != before:
            way = "headroom was measured" if len(paged) < len(before) else "more was needed"
            self.events.add("plan", f"{way}: {len(before)} to {len(paged)} blocks paged", **numbers)
        if not was_done and self.planner.done:
            self.events.add("settled", f"{len(paged)} blocks are paged", **numbers)
        self.pager.set(paged)

    def _settle_offload(self) -> None:
        """After two measured steps: stock if all fits, states included; else host memory."""
        self._offload_settled = True
        budget_bytes = self._budget.device_bytes
        peak_bytes = self._peak_bytes
        if self.planner is not None and self.pager.paged:
            peak_bytes = max(peak_bytes, self.planner.device_bytes([]))
        if self._needs.on_host:
            peak_bytes += self._needs.state_bytes()
        fits = peak_bytes <= _USABLE * budget_bytes
        numbers = {"needed": peak_bytes, "budget": budget_bytes}
        if fits and self._needs.on_host:
            _convert.to_stock(self.optimizer, fused=True)
            self._needs.on_host = False
            self._replan()
            self.events.add("optimizer", "torch's again: all fits", **numbers)
        elif not fits and not self._needs.on_host:
            self._move_states_to_host()
            self.events.add("optimizer", "in host memory: not all fits", **numbers)
        else:
            stays = "stock: all fits" if fits else "in host memory: not all would fit"
            self.events.add("optimizer", f"{stays}; settled", **numbers)

    def _move_states_to_host(self) -> None:
        paged_bytes, host_bytes = self.pager.bytes_paged, self._budget.host_bytes
        moments = _needs.choose_moments("auto", self._needs, paged_bytes, host_bytes, check=False)
        self._needs.on_host = True
        self._to_host(moments)
        self._replan()

    def _replan(self) -> None:
        """Blocks have other sizes now. What is paged stays, until a step was measured."""
        if self.planner is None:
            return
        paged = self.pager.paged
        sizes = self.pager.block_bytes
        resident = sum(size for i, size in enumerate(sizes) if i not in paged)
        fixed = min(self._fixed_bytes(), max(0, self._peak_bytes - resident))
        self.planner = self._make_planner(fixed, check_memory=False)  # Too late to refuse a run.
        self._extension.set_paged_room(self._room_bytes())

    # --- The end ---

    def close(self) -> None:
        """Everything resident, every hook gone, torch's optimizer again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.pager.set([])
        if _convert.is_host(self.optimizer) and not self._was_host:
            _convert.to_stock(self.optimizer)
            self._needs.on_host = False
        model = self._model()
        every = [*_with_gradients([*model.parameters(), *model.buffers()])]
        every += [s for p in model.parameters() for s in self._needs.states(p)]
        self.pager.bring_in(every)
        self.events.add("unwrapped", "everything is on the device, as far as there is room")


def _clipping_and_steps(options: Options, optimizer) -> tuple[float | None, int | None]:
    """What was asked for here; else what an optimizer of trainstream.optim has already."""
    settings = optimizer._settings if _convert.is_host(optimizer) else {}
    norm, steps = options.max_grad_norm, options.accumulation_steps
    return (
        settings.get("max_grad_norm") if norm is None else norm,
        settings.get("accumulation_steps") if steps is None else steps,
    )


def _with_storage(tensors) -> list[torch.Tensor]:
    return [t for t in tensors if torch._C._has_storage(t)]


def _with_gradients(tensors) -> list[torch.Tensor]:
    tensors = list(tensors)
    grads = [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return [*tensors, *grads]


def _budget_of(state, check_memory: bool) -> Budget:
    """What the pager has; before it knows, what it was asked to take."""
    stats = state.extension.stats()
    vram = stats.get("budget_bytes", 0) or state.config.vram
    left_bytes = stats.get("host_limit_bytes", 0) - stats.get("host_in_use_bytes", 0)
    ram = left_bytes if left_bytes > 0 else state.config.ram
    return Budget(vram=vram, ram=ram, check_memory=check_memory)
