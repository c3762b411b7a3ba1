"""Updates that run while backward does: each parameter's as soon as its gradient is finished.

Only for those who say how many backward passes make a step: an update cannot be taken back when one
more gradient comes. What is not done when the step ends, or begins only then since clipping needs
all gradients first, goes on while the next step begins: a weight waits for its own update only.
"""

import weakref

import torch

from trainstream import errors
from trainstream.optim._queue import Update, UpdateQueue

# Biases and norms, which the pager leaves alone (min_storage). Asked of a GPU's kernel in order
# with the gradients, they need nobody to wait for them.
_SMALL_BYTES = 1 << 20


class EarlyUpdates:
    """Counts gradients, and updates complete ones on a thread and, on GPUs, streams of its own.

    Two streams for each device: the first waits for gradients only, the second for updates. So the
    cores begin with gradients as they come, while a kernel of the updates before, which waits for
    its turn beside the backward pass, has not ended.

    Owner: the optimizer, which it knows weakly. Lock: none; `_counts` belongs to whoever runs
    backward, and the queue has its own.

    Args:
        optimizer: Has `_update(updates, after)`, `_check(param, grad)` and `_located(param)`.
        extension: The module `trainstream._C`.
        accumulation_steps: Gradients that a parameter gets before it is updated, >= 1. None: no
            update begins before later() says so.
    """

    def __init__(self, optimizer, extension, accumulation_steps: int | None):
        self._optimizer, self._extension = weakref.ref(optimizer), extension
        self._steps = accumulation_steps
        self._counts: dict[torch.Tensor, int] = {}
        self._hooks: dict[torch.Tensor, object] = {}
        self._queue = UpdateQueue(self._run, extension)
        # At the interpreter's end as well: a thread that then wants the GIL is ended in the middle
        # of C++ code, and the process with it.
        weakref.finalize(self, self._queue.stop)
        self._fault: BaseException | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._small: list[Update] = []
        self._elements = 0
        self._updated: set[torch.Tensor] = set()
        self._refused: set[torch.Tensor] = set()  # Of these: got one more gradient, and an error.

    def watch(self, params) -> None:
        """Hooks every parameter that requires a gradient and has no hook yet."""
        myself = weakref.ref(self)  # A parameter does not keep its optimizer.

        def gradient_done(param: torch.Tensor) -> None:
            early = myself()
            if early is not None:
                early._gradient_done(param)

        for param in params:
            if param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(gradient_done)

    def __del__(self):
        for hook in self._hooks.values():
            hook.remove()

    def begin_step(self) -> None:
        """Gradients count from nothing again."""
        self._counts.clear()
        self._updated.clear()
        self._refused.clear()

    def check_gradients(self) -> None:
        """Raises where an updated parameter was given another gradient, past backward."""
        if any(p.grad is not None for p in self._updated - self._refused):
            raise errors.gradient_set_after_update()

    def wait(self) -> None:
        """Until all updates are done, for the host and for the current streams.

        Raises:
            What an update raised.
        """
        self._queue.wait()
        self._order_after_updates()
        self._raise_fault()

    def wait_on_host(self) -> None:
        """Until the host has done its part of all updates."""
        self._queue.wait()

    def settle(self, *tensors: torch.Tensor) -> bool:
        """Likewise, but for updates that everybody waits for by themselves: these may come later.

        Returns:
            Whether there may be such updates, beside each of `tensors`.
        """
        if not all(self._extension.may_leave_pending(tensor) for tensor in tensors):
            self.wait()
            return False
        if self._queue.wait(lambda update: not update.may_come_later):
            self._order_after_updates()
        self._raise_fault()
        self._queue.keep((self, self._optimizer()))
        return True

    def take_small(self) -> list[Update]:
        """Updates that are for the step itself, in order for the current streams."""
        small, self._small = self._small, []
        for update in small:
            if update.ready is not None:
                torch.cuda.current_stream(update.param.device).wait_event(update.ready)
        return small

    def take_elements(self) -> int:
        """Of all updates that were put since the last call, done or not."""
        elements, self._elements = self._elements, 0
        return elements

    def later(self, work: list[tuple], scale: float) -> list[Update]:
        """Updates while the next step begins, the first of `work` first.

        Args:
            work: (group, index, parameter, gradient) of each, which is checked.
            scale: What gradients are multiplied by.

        Returns:
            Those that are for the step itself.
        """
        ready = {}
        for _, _, param, _ in work:
            if param.is_cuda and param.device not in ready:
                ready[param.device] = torch.cuda.current_stream(param.device).record_event()
        updates = []
        for group, index, param, grad in work:
            weights, event = param.detach(), ready.get(param.device)
            used = [weights, grad]  # The script has the gradient, and may fill it with zeros.
            updates.append(self._update_of(group, index, param, grad, weights, event, scale, used))
        self._queue.put([update for update in updates[::-1] if not _is_small(update)])
        if self._queue.wait(lambda update: not update.may_come_later):
            self._order_after_updates()
        self._queue.keep((self, self._optimizer()))
        return [update for update in updates if _is_small(update)]

    def _order_after_updates(self) -> None:
        for device, streams in self._streams.items():
            for stream in streams:
                torch.cuda.current_stream(device).wait_stream(stream)

    def _raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            self._small.clear()  # Of a step that failed nothing more is done.
            self._elements = 0
            raise fault

    def _gradient_done(self, param: torch.Tensor) -> None:
        if param in self._updated:
            self._refused.add(param)
            raise errors.gradient_after_update(self._steps)
        count = self._counts[param] = self._counts.get(param, 0) + 1
        optimizer = self._optimizer()
        if count < self._steps or optimizer is None or self._fault is not None:
            return
        place = optimizer._located(param)
        if place is None:  # The optimizer's no more.
            return
        try:
            optimizer._check(param, param.grad)
        except Exception as fault:
            self._fault = fault  # Raised by step().
            return
        if self._queue.holds(param):  # One step's update after the other.
            self._queue.wait(lambda update: update.param is param)
        self._updated.add(param)
        grad, param.grad = param.grad, None
        event = None
        if param.is_cuda:
            event = torch.cuda.current_stream(param.device).record_event()
        weights = param.detach()
        update = self._update_of(*place, param, grad, weights, event, 1.0, [weights])
        if _is_small(update):
            self._small.append(update)
        else:
            self._queue.put([update])

    def _update_of(self, group, index, param, grad, weights, ready, scale, used) -> Update:
        # As they are now: the script may change them before the thread comes to it.
        settings = {**group, "lr": float(group["lr"])}
        writes = [self._extension.PendingWrite(tensor) for tensor in used]
        self._elements += param.numel()
        is_ours = param.grad is not grad
        return Update(settings, index, param, weights, grad, is_ours, ready, scale, writes)

    def _run(self, updates: list[Update]) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._fault is not None:
            return
        try:
            with torch.no_grad():
                self._update(optimizer, updates)
        except BaseException as fault:  # Raised again where the script waits.
            self._fault = fault

    def _update(self, optimizer, updates: list[Update]) -> None:
        groups: dict[tuple, list[Update]] = {}
        for update in updates:
            groups.setdefault((update.weights.device, update.scale), []).append(update)
        for (device, scale), group in groups.items():
            work = [update.work for update in group]
            if device.type != "cuda":
                optimizer._update(work, scale)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
            ready, updated = self._streams[device]
            with torch.cuda.stream(ready):
                for update in group:
                    if update.ready is not None:
                        ready.wait_event(update.ready)
                optimizer._update(work, scale, updated.cuda_stream)
            self._end(group, ready, updated)

    def _end(self, updates: list[Update], ready, updated) -> None:
        """Who waits for `updated` finds them done."""
        updated.wait_stream(ready)  # Operators on it may have copied what is not dense.
        for update in updates:
            for tensor in (update.weights, update.grad):  # Their memory is another stream's.
                tensor.record_stream(ready)
                tensor.record_stream(updated)
            update.end(updated.cuda_stream)


def _is_small(update: Update) -> bool:
    """Nobody waits for its weights by themselves, and a kernel is done with them at once."""
    return not update.may_come_later and update.weights.nbytes < _SMALL_BYTES
