"""What one parameter has in host memory: its moments, and what makes its master exact."""

from dataclasses import dataclass, replace
from types import ModuleType

import torch

# What lies beside the weights of a half-precision parameter; see Slot.residual.
RESIDUALS = {torch.bfloat16: torch.int16, torch.float16: torch.float32}


@dataclass
class Slot:
    """Owner: the optimizer, one a parameter. All tensors are CPU tensors like the parameter.

    Args:
        kind: What the parameter was when this was made: device, dtype, shape, strides. Another
            parameter needs another slot.
        exp_avg, exp_avg_sq: The moments, float32 or bfloat16.
        residual: bfloat16 parameters: int16, the master less the weight. float16: float32 masters.
        checksums: bfloat16 parameters: int32, one for each tile of weights as last written.
    """

    kind: tuple
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    residual: torch.Tensor | None
    checksums: torch.Tensor | None

    @classmethod
    def zeros(cls, extension: ModuleType, param: torch.Tensor, moments: torch.dtype) -> "Slot":
        """Moments of zero; the master is the weight, since no checksum fits."""
        residual_dtype = RESIDUALS.get(param.dtype)
        return cls(
            kind_of(param),
            extension.zeros_on_host(param, moments),
            extension.zeros_on_host(param, moments),
            extension.zeros_on_host(param, residual_dtype) if residual_dtype else None,
            extension.checksums_on_host(param) if param.dtype is torch.bfloat16 else None,
        )

    @property
    def size_bytes(self) -> int:
        """Host memory that its tensors take."""
        tensors = (self.exp_avg, self.exp_avg_sq, self.residual, self.checksums)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def with_zero_moments(self, extension: ModuleType, param: torch.Tensor) -> "Slot":
        """The same master, and moments as at the beginning."""
        moments = self.exp_avg.dtype
        return replace(
            self,
            exp_avg=extension.zeros_on_host(param, moments),
            exp_avg_sq=extension.zeros_on_host(param, moments),
        )

    def master(self, extension: ModuleType, param: torch.Tensor) -> torch.Tensor | None:
        """float32 masters of half-precision parameters, as a CPU tensor; None for float32."""
        if param.dtype not in RESIDUALS:
            return None
        if self.kind[1:3] != (param.dtype, tuple(param.shape)):  # It became another since.
            return param.detach().float().cpu()
        weights = torch.empty_like(self.exp_avg, dtype=param.dtype).copy_(param)
        if param.dtype is torch.bfloat16:
            return extension.join_master(weights, self.residual, self.checksums)
        ours = self.residual.to(torch.float16) == weights
        return torch.where(ours, self.residual, weights.float())

    def set_master(self, extension: ModuleType, master: torch.Tensor) -> None:
        """Takes float32 masters; they count once the weights are what they round to."""
        if self.residual is None:
            return
        ordered = torch.empty_like(self.exp_avg, dtype=torch.float32).copy_(master)
        if self.checksums is None:
            self.residual.copy_(ordered)
        else:
            extension.split_master(ordered, self.residual, self.checksums)


def kind_of(param: torch.Tensor) -> tuple:
    return param.device, param.dtype, tuple(param.shape), param.stride()


def bytes_needed(param: torch.Tensor, moments: torch.dtype) -> int:
    """Host memory of a slot: moments, and 2 bytes an element beside bfloat16, 4 beside float16."""
    residual = RESIDUALS.get(param.dtype)
    return param.numel() * (2 * moments.itemsize + (residual.itemsize if residual else 0))
