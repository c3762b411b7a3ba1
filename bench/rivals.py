"""The ways to train that are compared: trainstream's optimizer, and the rivals that offload.

Each kind says what it imports, so that what is not installed is skipped with a reason, and how it
changes the one training step of qwen2.Trainer. Weights and gradients are bfloat16 throughout; which
type the optimizer's states have is each library's own choice.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch


def fused_adamw(model, lr, device):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=device == "cuda")


def host_optimizer(model, lr, device, max_grad_norm=None):
    import trainstream.optim

    return trainstream.optim.AdamW(
        model.parameters(),
        lr=lr,
        moments="bfloat16",
        max_grad_norm=max_grad_norm,
        accumulation_steps=1,
    )


def clipping_host_optimizer(model, lr, device):
    return host_optimizer(model, lr, device, max_grad_norm=1.0)


def no_update(model, lr, device):
    """Only forward and backward are measured: an optimizer of nothing, so that steps have an end.

    Gradients live until the next forward, so that they can be compared after the last step.
    """
    model.register_forward_pre_hook(lambda *_: model.zero_grad(set_to_none=True))
    return torch.optim.SGD([torch.zeros(1, device=device, requires_grad=True)], lr=lr)


def lora(model, device):
    """Adapters of rank 16 beside every linear layer of the blocks; they alone are trained."""
    import peft

    model.enable_input_require_grads()  # Else nothing in a checkpointed block needs a gradient.
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules="all-linear"))
    return model.to(device)


def process_group():
    """torchrun's; where nothing launched this process, one of it alone, with no network."""
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def data_parallel(model, device):
    from torch.nn.parallel import DistributedDataParallel

    process_group()
    return DistributedDataParallel(model.to(device))


def shard(model, device, **options):
    """FSDP2: each block, and the rest with the model itself. It moves what each rank keeps."""
    from torch.distributed import get_world_size
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    process_group()
    mesh = init_device_mesh(device, (get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_offload(model, device):
    """FSDP2 with parameters, gradients and optimizer in page-locked host memory."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    return shard(model, device, offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda"))


def torchao_offload(model, lr, device):
    from torchao.optim import CPUOffloadOptimizer

    # Gradients leave as they come, which is its form for the least device memory.
    return CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=lr, fused=True
    )


def bitsandbytes_paged(model, lr, device):
    import bitsandbytes

    return bitsandbytes.optim.PagedAdamW32bit(model.parameters(), lr=lr)


class DeepSpeedEngine:
    """ZeRO-3 with parameters and optimizer in page-locked host memory, its own CPU Adam."""

    def __init__(self, model, lr, sequences):
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)):
            os.environ.setdefault(name, str(value))
        process_group()
        offload = {"device": "cpu", "pin_memory": True}
        settings = {
            "train_micro_batch_size_per_gpu": sequences,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload,
                "offload_optimizer": offload,
            },
        }
        adam = DeepSpeedCPUAdam(model.parameters(), lr=lr, adamw_mode=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)

    def __call__(self, **batch):
        return self.engine(**batch)

    def update(self, loss):
        self.engine.backward(loss)
        self.engine.step()


@dataclass(frozen=True)
class Kind:
    """One way to train.

    Args:
        imports: Modules without which it cannot run.
        needs_gpu: It does not run on CPU tensors.
        wrap: (model, device) to the model with something around it; called before it moves, and
            moves it itself. None: nothing is put around it.
        optimizer: (model, lr, device) to the optimizer.
        engine: (model, lr, sequences) to what runs the model and updates it, in place of both.
    """

    imports: tuple[str, ...] = ()
    needs_gpu: bool = False
    wrap: Callable | None = None
    optimizer: Callable = fused_adamw
    engine: Callable | None = None

    def missing(self) -> str | None:
        """Why it cannot run here; None when it can."""
        for name in self.imports:
            try:
                importlib.import_module(name)
            except Exception as fault:  # Libraries with kernels fail in many ways.
                lines = str(fault).strip().splitlines() or [""]
                return f"cannot import {name}: {type(fault).__name__}: {lines[0]}"
        if self.needs_gpu and not torch.cuda.is_available():
            return "it needs a GPU"
        return None


KINDS = {
    "stock": Kind(),
    "forward-backward": Kind(optimizer=no_update),
    "lora": Kind(("peft",), wrap=lora),
    "host-optimizer": Kind(optimizer=host_optimizer),
    "host-optimizer-clipping": Kind(optimizer=clipping_host_optimizer),
    "ddp": Kind(wrap=data_parallel),
    "fsdp2": Kind(wrap=shard),
    "fsdp2-offload": Kind(wrap=fsdp2_offload),
    "torchao-offload": Kind(("torchao.optim",), needs_gpu=True, optimizer=torchao_offload),
    "deepspeed-zero3": Kind(
        ("deepspeed", "deepspeed.ops.adam"),
        needs_gpu=True,
        wrap=lambda model, device: model,  # It moves the model itself, a layer at a time.
        engine=DeepSpeedEngine,
    ),
    "bitsandbytes-paged": Kind(("bitsandbytes",), needs_gpu=True, optimizer=bitsandbytes_paged),
}
