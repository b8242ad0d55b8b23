"""Gradients that take fewer bytes on the wire: DDP communication hooks, by name."""

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .network import bf16_compress_hook
from .process_group import this_rank

COMPRESSIONS = ("none", "fp16", "bf16", "powersgd")
RANK = 4  # of the two thin matrices that PowerSGD sends for each weight matrix
FIRST_STEPS = 10  # of all-reducing everything, while gradients change most
ALL = 1_000_000  # MB in a bucket


def compressed_ddp(model: nn.Module, compression: str) -> DistributedDataParallel:
    """Return the model in DDP, its gradients sent in "fp16" or "bf16" (half the bytes), by
    "powersgd", or as they are ("none").

    PowerSGD (Vogels et al. 2019) sends low-rank factors and keeps what they miss for the next step;
    that rest is not in a checkpoint. On a CPU it has one bucket for all gradients: torch's hook
    all-reduces several at once, which gloo then matches in another order on each rank. Every rank
    must call it. Raises ValueError for an unknown compression.
    """
    if compression not in COMPRESSIONS:
        known = ", ".join(COMPRESSIONS)
        raise ValueError(f"unknown compression {compression!r}: choose from {known}.")
    one_bucket = compression == "powersgd" and this_rank().device.type == "cpu"
    model = DistributedDataParallel(model, bucket_cap_mb=ALL if one_bucket else None)
    if compression == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd

        state = power_sgd.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_STEPS
        )
        model.register_comm_hook(state, power_sgd.powerSGD_hook)
    elif compression != "none":
        hooks = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
        model.register_comm_hook(None, hooks[compression])
    return model
