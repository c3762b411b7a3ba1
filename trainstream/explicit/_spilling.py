"""Activations that a wrapped model spills: `trainstream.spill_activations` around its forward."""

from torch import nn

from trainstream import errors


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
        self._entered: list = []

    def watch(self, model: nn.Module) -> list:
        """Registers the hooks; returns their handles."""
        return [
            model.register_forward_pre_hook(self.before),
            model.register_forward_hook(self.after, always_call=True),
        ]

    def before(self, module: nn.Module, args) -> None:
        """As the forward begins."""
        import trainstream

        context = trainstream.spill_activations(share=self._share)
        context.__enter__()
        self._entered.append(context)

    def after(self, module: nn.Module, args, output) -> None:
        """As it ends, whether it raised or not."""
        if self._entered:
            self._entered.pop().__exit__(None, None, None)
