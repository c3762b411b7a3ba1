"""What is done to gradients before a step: averaged over the ranks, then clipped."""

from torch import nn

from trainstream import errors
from trainstream.explicit._data_parallel import DataParallel
from trainstream.optim import _convert


class Gradients:
    """Finishes the gradients of one optimizer. Owner: the session. Lock: none; works in step().

    Args:
        optimizer: A torch.optim.Optimizer or None.
        max_norm: Of all gradients, for a stock optimizer; trainstream.optim's clips itself. None:
            they are not clipped.

    Attributes:
        parallel: Averages them; None where nobody does.
    """

    def __init__(self, optimizer, max_norm: float | None):
        self.parallel: DataParallel | None = None
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._scales: bool | None = None  # What the optimizer had said of GradScaler.
        self._hook = None

    def watch(self) -> "Gradients":
        """From now on every step begins with this. Undone by remove()."""
        self._hook = self._optimizer.register_step_pre_hook(self._before_step)
        if self.parallel is not None:
            # Else a GradScaler would skip the step of a rank, and the others would wait for it.
            self._scales = getattr(self._optimizer, "_step_supports_amp_scaling", None)
            self._optimizer._step_supports_amp_scaling = True
        return self

    def remove(self) -> None:
        """Steps are as before."""
        self._hook.remove()
        if self.parallel is not None:
            self._optimizer._step_supports_amp_scaling = self._scales
            if self._scales is None:
                del self._optimizer._step_supports_amp_scaling
        self.parallel = None

    def _before_step(self, optimizer, args, kwargs):
        if self.parallel is None and not self._clips():
            return None
        if self.parallel is not None and getattr(optimizer, "found_inf", None) is not None:
            raise errors.scaler_with_ranks()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._finish()
            return None

        def closure_and_more():
            loss = closure()
            self._finish()
            return loss

        return (optimizer,), {**kwargs, "closure": closure_and_more}

    def _clips(self) -> bool:
        return self._max_norm is not None and not _convert.is_host(self._optimizer)

    def _finish(self) -> None:
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if self.parallel is not None:
            self.parallel.average(params)
        if self._clips():
            nn.utils.clip_grad_norm_(params, self._max_norm)
