"""Updates that wait for their turn on a thread of their own."""

import os
import threading
import weakref
from collections.abc import Callable

import torch

# Parameters that one update has at most, unless one has more. All of an update is in place until it
# has ended, gradients too: 128 Mi elements are 16 ms at 0.12 ns each and half a GiB in 16 bits. The
# cores and the kernel end within a millisecond of each other, so shorter ones would cost more.
_BATCH_ELEMENTS = 128 << 20


class Update:
    """One parameter's update, from the moment that its gradient is complete.

    Owner: the queue. Lock: none; one thread at a time has it. While `writes` are open, other
    threads that use the weights or the gradient wait.

    Args:
        settings: Of the parameter's group, as they were then.
        index: The parameter's number among all.
        param: The parameter, shape (*), and `weights`: its memory then, which a script may exchange
            before the update's turn comes.
        grad: Its gradient, shape (*).
        ready: A CUDA event after which the gradient is there; None: it is, or is in order.
        scale: What the gradient is multiplied by.
        writes: An extension's PendingWrite for each of the two that others may not touch meanwhile.
    """

    def __init__(self, settings, index, param, weights, grad, ready, scale, writes):
        self.settings, self.index, self.param, self.weights = settings, index, param, weights
        self.grad, self.ready, self.scale, self.writes = grad, ready, scale, writes

    @property
    def may_come_later(self) -> bool:
        """Whether everybody else waits for it by themselves."""
        return all(write.is_announced for write in self.writes)

    def end(self, stream: int | None) -> None:
        """It is done; what the host has not done is in order on `stream`."""
        for write in self.writes:
            write.end(stream)


class UpdateQueue:
    """Hands updates to a thread, which has them done by `run`: what nobody else waits for by
    themselves first, then the newest. Gradients come from the last layer to the first, and the next
    step needs the first layer's weights first.

    Owner: EarlyUpdates. Lock: `_changed`, for all but `_workers`, which whoever starts updates has:
    one thread at a time. The thread holds no reference to the owner while it has nothing to do.

    Args:
        run: Called on the thread with a list of updates; raises nothing. A bound method, of which
            the object is known weakly.
        make_pending_writes: Called once, on the thread.
    """

    def __init__(self, run: Callable, make_pending_writes: Callable):
        self._run, self._make_pending_writes = weakref.WeakMethod(run), make_pending_writes
        self._changed = threading.Condition()
        self._waiting: list[Update] = []
        self._running: list[Update] = []
        self._keeper: object = None  # Lives until all is done.
        self._stopped = False
        self._workers: list[threading.Thread] = []  # The last one works.
        self._pid = os.getpid()

    def put(self, updates: list[Update]) -> None:
        """The last one of them comes first."""
        self._start_worker()
        with self._changed:
            self._waiting += updates
            self._changed.notify_all()

    def holds(self, param: torch.Tensor) -> bool:
        """Whether an update of `param` is yet to end."""
        with self._changed:
            return any(update.param is param for update in self._open())

    def keep(self, keeper: object) -> None:
        """`keeper` lives until what there is now is done."""
        with self._changed:
            self._keeper = keeper if self._open() else None

    def wait(self, which: Callable = lambda update: True) -> None:
        """Until all updates of which `which` is true have ended; not on the thread itself."""
        if threading.current_thread() in self._workers:
            return
        with self._changed:
            wanted = [update for update in self._open() if which(update)]
        if not wanted:
            return
        self._start_worker()  # A forked child has none.
        with self._changed:
            while any(update in wanted for update in self._open()):
                self._changed.wait()

    def stop(self) -> None:
        """The thread does what there is, and ends."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread() and worker.is_alive():
                worker.join()

    def _open(self) -> list[Update]:
        return self._waiting + self._running

    def _start_worker(self) -> None:
        if self._pid != os.getpid():  # A fork copies no threads, and locks as they were.
            self._pid, self._changed, self._running = os.getpid(), threading.Condition(), []
            self._workers.clear()
        if not self._workers:
            worker = threading.Thread(target=self._work, daemon=True)
            self._workers.append(worker)
            worker.start()

    def _work(self) -> None:
        self._make_pending_writes()
        while True:
            with self._changed:
                while not self._waiting and not self._stopped:
                    self._changed.wait()
                if not self._waiting:
                    return
                self._running = self._take()
            self._do_running()
            with self._changed:
                self._running = []
                keeper = self._keeper
                self._keeper = keeper if self._waiting else None
                self._changed.notify_all()
            del keeper  # Which may end here, and stop this queue.

    def _do_running(self) -> None:
        """In a function of its own: no variable keeps a gradient until the next updates come."""
        run = self._run()
        if run is not None:
            run(self._running)
        for update in self._running:
            update.end(None)  # If it has not ended.

    def _take(self) -> list[Update]:
        """Several at once: large updates share the cores best."""
        plain = [update for update in self._waiting if not update.may_come_later]
        if plain:
            self._waiting = [update for update in self._waiting if update.may_come_later]
            return plain[::-1]
        taken, elements = [], 0
        while self._waiting and elements < _BATCH_ELEMENTS:
            taken.append(self._waiting.pop())
            elements += taken[-1].param.numel()
        return taken
