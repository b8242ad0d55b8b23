"""Gradients that take fewer bytes on the wire: DDP communication hooks, by name."""

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .network import bf16_compress_hook

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
RANK = 4  # of the two thin matrices that PowerSGD sends for each weight matrix
FIRST_STEPS = 10  # of all-reducing everything, while gradients change most


def compress(model: DistributedDataParallel, compression: str) -> None:
    """Have a DDP model's gradients sent in "fp16" or "bf16" (half the bytes) or by "powersgd".

    PowerSGD (Vogels et al. 2019) sends low-rank factors and keeps what they miss for the next step;
    that rest is not in a checkpoint. Every rank must call it, before the first backward. "none"
    leaves the model as it is; a model that is not DDP's, on a single process, has nothing to send.
    """
    if compression not in COMPRESSIONS:
        known = ", ".join(COMPRESSIONS)
        raise ValueError(f"unknown compression {compression!r}: choose from {known}.")
    if compression == "none" or not isinstance(model, DistributedDataParallel):
        return
    if compression == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_STEPS
        )
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
        return
    hooks = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
    model.register_comm_hook(None, hooks[compression])
