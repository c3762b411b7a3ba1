"""Activations that a wrapped model spills: `trainstream.spill_activations` around its forward."""

import threading

from torch import nn

from trainstream import errors

_local = threading.local()  # .entered: of this thread, (model, context), the innermost last.


class Spilling:
    """Spills a share of what one model's forward saves. Owner: the session.

    Its methods are the hooks; it has no state between two forwards, so a model is copied with them.

    Args:
        share: From 0.0 to 1.0.

    Raises:
        TrainstreamError: This version cannot spill.
    """

    def __init__(self, share: float):
        import trainstream

        if not hasattr(trainstream, "spill_activations"):
            raise errors.no_spilling(share)
        self._share = share

    def watch(self, model: nn.Module) -> list:
        """Registers the hooks; returns their handles."""
        return [
            model.register_forward_pre_hook(self.before),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args) -> None:
        """As the forward begins."""
        import trainstream

        # An interrupted forward (Ctrl-C) left its context: torch calls `after` for errors only.
        self._leave(module)
        context = trainstream.spill_activations(share=self._share)
        context.__enter__()
        _entered().append((module, context))

    def after(self, module: nn.Module, args, output) -> None:
        """As it ends, whether it raised or not."""
        self._leave(module)

    def _leave(self, module: nn.Module) -> None:
        entered = _entered()
        while any(model is module for model, _ in entered):
            entered.pop()[1].__exit__(None, None, None)


def _entered() -> list:
    if not hasattr(_local, "entered"):
        _local.entered = []
    return _local.entered
