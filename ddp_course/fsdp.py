"""Fully sharded data parallel (PyTorch's FSDP2) where DDP keeps everything on every rank.

Each rank holds 1/world_size of the weights, the gradients and the optimizer's state, and gathers
a block's weights for as long as it computes with them: ZeRO's stage 3 (Rajbhandari et al. 2020).
The training loop stays as it is.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch import nn

from .process_group import this_rank


def shard(model: nn.Module) -> nn.Module:
    """Shard a model in place, block by block if it has `blocks`; return it, for use like a DDP one.

    Every rank must call it, before the optimizer is made. Needs a process group.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(this_rank().device.type, (dist.get_world_size(),))
    for part in (*getattr(model, "blocks", ()), model):
        fully_shard(part, mesh=mesh)
    model.no_sync = functools.partial(_no_sync, model)
    return model


@contextlib.contextmanager
def _no_sync(model):
    """As DDP's: gradients add up on the rank, whole, until a backward outside of it."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def is_sharded(model: nn.Module) -> bool:
    """Return whether `shard` made this model."""
    return hasattr(model, "set_requires_gradient_sync")


def whole(state):
    """Return a state, of a model or an optimizer, with each shard replaced by the whole tensor.

    Every rank must call it: the shards are gathered. What is not sharded stays as it is.
    """
    if isinstance(state, dict):
        return {name: whole(value) for name, value in state.items()}
    return state.full_tensor() if hasattr(state, "full_tensor") else state


def load(model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict, moments: dict) -> None:
    """Give a sharded model and its optimizer the whole states that `whole` returned.

    Every rank must call it. Raises RuntimeError for the states of another model.
    """
    own = model.state_dict()
    if _shapes(own) != _shapes(weights):
        raise RuntimeError("names or shapes of the weights differ")
    model.load_state_dict({name: _shard_like(own[name], value) for name, value in weights.items()})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: {name: _shard_like(parameters[number], value) for name, value in values.items()}
        for number, values in moments["state"].items()
    }
    optimizer.load_state_dict(moments | {"state": state})


def _shapes(state) -> dict:
    return {name: value.shape for name, value in state.items()}


def _shard_like(parameter, value):
    """Return this rank's shard of a value that has the parameter's shape; another one unchanged."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value  # such as Adam's count of steps
    value = value.to(this_rank().device)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
