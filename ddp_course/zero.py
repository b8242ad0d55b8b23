"""ZeRO stage 1 by hand: each rank keeps Adam's state for its share of the parameters only.

    optimizer = ShardedAdam(model.parameters(), lr=0.001)   # a plain model, not wrapped in DDP
    loss.backward()                                         # each rank on its own micro-batch
    optimizer.step()                                        # averages, steps its share, gathers
    optimizer.zero_grad()

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

import torch
import torch.distributed as dist


class ShardedAdam:
    """Adam on the mean gradient of all ranks, its state shared out: equal to Adam to rounding.

    All parameters are seen as one flat vector, padded to world_size equal shares. Frozen ones are
    left out; a gradient that is None counts as zeros. Keyword arguments are torch.optim.Adam's.
    Every rank must make it, with equal weights, and call `step` together. Raises ValueError for
    parameters of several types or devices, or none to train.
    """

    def __init__(self, parameters, **adam):
        self.parameters = [p for p in parameters if p.requires_grad]
        if len({(p.dtype, p.device) for p in self.parameters}) != 1:
            raise ValueError("a flat vector needs parameters to train, of one type and device.")
        self.share = torch.nn.Parameter(self._mine(self._flat(self.parameters)).clone())
        self.adam = torch.optim.Adam([self.share], **adam)

    def step(self) -> None:
        """Average the gradients, step this rank's share, hand the new weights to all ranks."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.share.grad = reduce_scatter_mean(self._flat(gradients))
        self.share.data.copy_(self._mine(self._flat(self.parameters)))  # if they were loaded since
        self.adam.step()
        self._write(all_gather(self.share.detach()))

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def state_bytes(self) -> int:
        """Return the bytes of this rank's optimizer state, step counters left out."""
        return state_bytes(self.adam)

    def _flat(self, tensors) -> torch.Tensor:
        """Return tensors as one vector, with zeros at the end so that shares are equal."""
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return torch.nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def _mine(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.chunk(dist.get_world_size())[dist.get_rank()]

    def _write(self, flat: torch.Tensor) -> None:
        start = 0
        for parameter in self.parameters:
            part = flat[start : start + parameter.numel()]
            parameter.data.copy_(part.view_as(parameter))
            start += parameter.numel()


def reduce_scatter_mean(flat: torch.Tensor) -> torch.Tensor:
    """Return this rank's share of the mean of `flat` [n · world_size] over ranks: [n].

    Every rank must call it. NCCL sends (N − 1) / N of the vector, half of an all-reduce; gloo has
    no reduce-scatter and does an all-reduce for it.
    """
    world_size = dist.get_world_size()
    shares = list(flat.chunk(world_size))
    mine = torch.empty_like(shares[0])
    dist.reduce_scatter(mine, shares)
    return mine / world_size


def all_gather(share: torch.Tensor) -> torch.Tensor:
    """Return all ranks' shares [n], in their order, as one vector. Every rank must call it."""
    shares = [torch.empty_like(share) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, share)
    return torch.cat(shares)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimizer's state on this rank, step counters left out."""
    states = (value for state in optimizer.state.values() for value in state.values())
    tensors = (local(value) for value in states if isinstance(value, torch.Tensor))
    return sum(value.nbytes for value in tensors if value.dim() > 0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds: of a DTensor its shard, else all of it."""
    return getattr(tensor, "to_local", lambda: tensor)()
