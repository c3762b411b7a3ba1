"""What training needs beside the weights, and whether it fits: the arithmetic of `wrap`."""

from collections.abc import Iterable

import torch

from trainstream import errors
from trainstream._text import format_bytes
from trainstream.optim import _convert
from trainstream.optim._slot import bytes_needed

# Of the budget: what a step is believed to make until one was measured. Too much costs a few blocks
# their place for a few steps, too little makes the pager work.
_ACTIVATIONS_PART = 8


class Needs:
    """What parameters need on the device, and on the host. Owner: the session.

    Args:
        optimizer: A torch.optim.Optimizer or None.
    """

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.on_host = False  # The optimizer's states.
        self.keeps_gradients = True  # They wait for the step.

    def training(self) -> set[torch.Tensor]:
        """The parameters that the optimizer updates now."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {p for group in groups for p in group["params"] if p.requires_grad}

    def states(self, param: torch.Tensor) -> list[torch.Tensor]:
        """The states that lie beside `param`; those of trainstream.optim are in host memory."""
        if self.optimizer is None or _convert.is_host(self.optimizer):
            return []
        state = self.optimizer.state.get(param, {})
        values = state.values() if isinstance(state, dict) else ()
        return [v for v in values if isinstance(v, torch.Tensor) and v.numel() > 1]

    def beside_bytes(self, params: Iterable[torch.Tensor]) -> int:
        """Device bytes of gradients, while they are kept, and of states: two of the parameter's
        type, which Adam will make; of other optimizers those that there are.
        """
        training = self.training()
        training = [p for p in params if p in training]
        gradients = _bytes_of(training) if self.keeps_gradients else 0
        if self.on_host:
            return gradients
        if isinstance(self.optimizer, torch.optim.Adam):
            return gradients + 2 * _bytes_of(training)
        return gradients + _bytes_of(state for p in training for state in self.states(p))

    def state_bytes(self) -> int:
        """Of Adam's states as torch has them."""
        return 2 * _bytes_of(self.training())

    def host_state_bytes(self, moments: torch.dtype) -> int:
        """Of trainstream.optim's: moments, and what makes masters exact."""
        return sum(bytes_needed(p, moments) for p in self.training())


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def activations_guess(device_bytes: int) -> int:
    """Device bytes of what a step makes, while nobody knows."""
    return device_bytes // _ACTIVATIONS_PART


def choose_moments(
    wanted: str, needs: Needs, paged_bytes: int, host_bytes: int, check: bool
) -> str:
    """ "float32" where they fit beside the paged blocks, else "bfloat16".

    Args:
        wanted: The same, or "auto".
        paged_bytes: Host memory of the paged blocks.
        host_bytes: What there is for both.
        check: Whether to refuse what does not fit.

    Raises:
        BudgetError: They do not fit, and `check`. The message has the arithmetic.
    """
    choices = ["float32", "bfloat16"] if wanted == "auto" else [wanted]
    for choice in choices:
        if needs.host_state_bytes(getattr(torch, choice)) + paged_bytes <= host_bytes:
            return choice
    if check:
        state_bytes = needs.host_state_bytes(getattr(torch, choices[-1]))
        check_host({f"{choices[-1]} moments and masters": state_bytes}, paged_bytes, host_bytes)
    return choices[-1]


def check_host(terms: dict[str, int], paged_bytes: int, host_bytes: int) -> None:
    """Raises BudgetError where the sum is more than there is."""
    terms = {**terms, "paged blocks": paged_bytes}
    needed = sum(terms.values())
    if needed > host_bytes:
        texts = {what: format_bytes(size) for what, size in terms.items() if size}
        missing = format_bytes(needed - host_bytes)
        raise errors.host_ram_short(texts, format_bytes(needed), format_bytes(host_bytes), missing)
