"""Updates that wait for their turn on a thread of their own."""

import os
import threading
import weakref
from collections.abc import Callable
from types import ModuleType

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
        is_ours: Nobody else has the gradient.
        ready: A CUDA event after which the gradient is there; None: it is, or is in order.
        scale: What the gradient is multiplied by.
        writes: An extension's PendingWrite for each of the two that others may not touch meanwhile.
    """

    def __init__(self, settings, index, param, weights, grad, is_ours, ready, scale, writes):
        self.settings, self.index, self.param, self.weights = settings, index, param, weights
        self.grad, self.is_ours, self.ready, self.scale = grad, is_ours, ready, scale
        self.writes = writes
        self.waiting: object = None  # The extension's WaitingGradient.

    @property
    def work(self) -> tuple:
        """As the optimizer's _update() takes it."""
        return self.settings, self.index, self.param, self.weights, self.grad

    @property
    def may_come_later(self) -> bool:
        """Whether everybody else waits for it by themselves."""
        return all(write.is_announced for write in self.writes)

    @property
    def is_ready(self) -> bool:
        return self.ready is None or self.ready.query()

    def wait_until_ready(self) -> None:
        if self.ready is not None:
            self.ready.synchronize()

    def let_gradient_leave(self, extension: ModuleType) -> None:
        """Makes room on the device until the update's turn comes, where that costs nobody else."""
        if self.is_ours and self.waiting is None and extension.may_leave_pending(self.grad):
            self.waiting = extension.WaitingGradient(self.grad)

    def end(self, stream: int | None) -> None:
        """It is done; what the host has not done is in order on `stream`."""
        self.waiting = None
        for write in self.writes:
            write.end(stream)


class UpdateQueue:
    """Hands updates to a thread, which has them done by `run`: of those whose gradients are there
    the newest first. Gradients come from the last layer to the first, and the next step needs the
    first layer's weights first. Gradients that have to wait leave the device meanwhile.

    Owner: EarlyUpdates. Lock: `_changed`, for all but `_workers`, which whoever starts updates has:
    one thread at a time. The thread holds no reference to the owner while it has nothing to do.

    Args:
        run: Called on the thread with a list of updates; raises nothing. A bound method, of which
            the object is known weakly.
        extension: The module `trainstream._C`.
    """

    def __init__(self, run: Callable, extension: ModuleType):
        self._run, self._extension = weakref.WeakMethod(run), extension
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
        self._renew_after_fork()
        with self._changed:
            return any(update.param is param for update in self._open())

    def keep(self, keeper: object) -> None:
        """`keeper` lives until what there is now is done."""
        self._renew_after_fork()
        with self._changed:
            self._keeper = keeper if self._open() else None

    def wait(self, which: Callable = lambda update: True) -> bool:
        """Until all updates of which `which` is true have ended; not on the thread itself. False:
        there was none."""
        self._renew_after_fork()
        if threading.current_thread() in self._workers:
            return False
        with self._changed:
            wanted = [update for update in self._open() if which(update)]
        if not wanted:
            return False
        self._start_worker()  # A forked child has none.
        with self._changed:
            while any(update in wanted for update in self._open()):
                self._changed.wait()
        return True

    def stop(self) -> None:
        """The thread does what there is, and ends."""
        self._renew_after_fork()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread() and worker.is_alive():
                worker.join()

    def _open(self) -> list[Update]:
        return self._waiting + self._running

    def _renew_after_fork(self) -> None:
        """A fork copies no threads, and locks as they were: another thread may have had them."""
        if self._pid != os.getpid():
            self._pid, self._changed, self._running = os.getpid(), threading.Condition(), []
            self._workers.clear()

    def _start_worker(self) -> None:
        self._renew_after_fork()
        if not self._workers:
            worker = threading.Thread(target=self._work, daemon=True)
            self._workers.append(worker)
            worker.start()

    def _work(self) -> None:
        self._extension.make_pending_writes()
        while True:
            try:
                if not self._take():
                    return
            except Exception:  # A broken device: the updates say so.
                with self._changed:
                    self._running, self._waiting = self._waiting, []
            self._do_running()
            with self._changed:
                self._running = []
                keeper = self._keeper
                self._keeper = keeper if self._waiting else None
                self._changed.notify_all()
            del keeper  # Which may end here, and stop this queue.

    def _take(self) -> bool:
        """Makes running what comes next: several at once, since large updates share the cores best.
        False: nothing does any more.
        """
        with self._changed:
            while not self._waiting and not self._stopped:
                self._changed.wait()
            if not self._waiting:
                return False
            oldest = self._waiting[0]
        oldest.wait_until_ready()  # The newest would keep the cores idle until backward ends.
        with self._changed:
            waiting = [update for update in self._waiting if update.is_ready]
            elements = 0
            while waiting and elements < _BATCH_ELEMENTS:
                self._running.append(waiting.pop())
                elements += self._running[-1].param.numel()
            self._waiting = [one for one in self._waiting if one not in self._running]
        self._let_leave(waiting)
        return True

    def _let_leave(self, updates: list[Update]) -> None:
        """Of the gradients that are there, and wait, all but the next ones' leave the device."""
        elements = 0
        for update in updates[::-1]:
            elements += update.param.numel()
            if elements > _BATCH_ELEMENTS:
                update.let_gradient_leave(self._extension)

    def _do_running(self) -> None:
        """In a function of its own: no variable keeps a gradient until the next updates come."""
        run = self._run()
        if run is not None:
            run(self._running)
        for update in self._running:
            update.end(None)  # If it has not ended.
