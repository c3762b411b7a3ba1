"""Updates that run while backward does: each parameter's as soon as its gradient is finished.

Only for those who say how many backward passes make a step: an update cannot be taken back when one
more gradient comes.
"""

import os
import queue
import threading
import weakref

import torch

from trainstream import errors

# Parameters that one update has at most, unless one has more. All of an update is in place until it
# has ended, gradients too: 128 Mi elements are 16 ms at 0.12 ns each and half a GiB in 16 bits. The
# cores and the kernel end within a millisecond of each other, so shorter ones would cost more.
_BATCH_ELEMENTS = 128 << 20


class EarlyUpdates:
    """Counts gradients, and updates complete ones on a thread and, on GPUs, streams of its own.

    Two streams for each device: the first waits for gradients only, the second for updates. So the
    cores begin with gradients as they come, while a kernel of the updates before, which waits for
    its turn beside the backward pass, has not ended.

    Owner: the optimizer, which it knows weakly. Lock: none; `_counts` belongs to whoever runs
    backward, the queue is thread-safe, and between wait() and the next backward nothing runs.

    Args:
        optimizer: Has `_update(work, grad_scale)` and `_located(param)`.
        accumulation_steps: Gradients that a parameter gets before it is updated, >= 1.
    """

    def __init__(self, optimizer, accumulation_steps: int):
        self._optimizer = weakref.ref(optimizer)
        self._steps = accumulation_steps
        self._counts: dict[torch.Tensor, int] = {}
        self._hooks: dict[torch.Tensor, object] = {}
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []  # The last one works.
        # At the interpreter's end as well: a thread that then wants the GIL is ended in the middle
        # of C++ code, and the process with it.
        weakref.finalize(self, _stop, self._queue, self._workers)
        self._pid = 0
        self._fault: BaseException | None = None
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
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
        """Gradients count from nothing again. Requires: no update runs (wait())."""
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
        if self._workers:
            self._start_worker()  # A forked child has none, but what was queued.
            done = threading.Event()
            self._queue.put(done)
            done.wait()
        for device, streams in self._streams.items():
            for stream in streams:
                torch.cuda.current_stream(device).wait_stream(stream)
        fault, self._fault = self._fault, None
        if fault is not None:
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
        # As they are now: the script may change them before the thread comes to it.
        settings = {**place[0], "lr": float(place[0]["lr"])}
        self._updated.add(param)
        grad, param.grad = param.grad, None
        event = None
        if param.is_cuda:
            event = torch.cuda.current_stream(param.device).record_event()
        self._start_worker()
        self._queue.put((settings, place[1], param, grad, event))

    def _start_worker(self) -> None:
        if not self._workers or self._pid != os.getpid():  # A fork does not copy threads.
            self._pid = os.getpid()
            worker = threading.Thread(
                target=_work, args=(self._queue, weakref.ref(self)), daemon=True
            )
            self._workers[:] = [worker]
            worker.start()

    def _run(self, items: list[tuple]) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._fault is not None:
            return
        try:
            with torch.no_grad():
                self._update(optimizer, items)
        except BaseException as fault:  # Raised again where the script waits.
            self._fault = fault

    def _update(self, optimizer, items: list[tuple]) -> None:
        work = [item[:4] for item in items]
        for _, _, param, grad in work:
            optimizer._check(param, grad)
        by_device: dict[torch.device, list[tuple]] = {}
        for entry in work:
            by_device.setdefault(entry[2].device, []).append(entry)
        for device, entries in by_device.items():
            if device.type != "cuda":
                optimizer._update(entries, 1.0)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
            ready, updated = self._streams[device]
            with torch.cuda.stream(ready):
                for *_, event in items:
                    if event is not None:
                        ready.wait_event(event)
                optimizer._update(entries, 1.0, updated.cuda_stream)
                for _, _, _, grad in entries:  # Its memory is the backward stream's.
                    grad.record_stream(ready)
                    grad.record_stream(updated)


def _stop(work: queue.SimpleQueue, workers: list[threading.Thread]) -> None:
    work.put(None)
    for worker in workers:
        if worker is not threading.current_thread() and worker.is_alive():
            worker.join()


def _elements(item) -> int:
    return item[2].numel() if isinstance(item, tuple) else 0


def _work(work: queue.SimpleQueue, owner: weakref.ref) -> None:
    """Takes what is there at once, up to _BATCH_ELEMENTS: large updates share the cores best."""
    while True:
        items = [work.get()]
        elements = _elements(items[0])
        while not work.empty() and elements < _BATCH_ELEMENTS:
            items.append(work.get())
            elements += _elements(items[-1])
        waiting = [item for item in items if isinstance(item, threading.Event)]
        early = owner()
        if early is not None:
            early._run([item for item in items if isinstance(item, tuple)])
        for event in waiting:
            event.set()
        if early is None or None in items:
            return
        del early, items
