"""The training of 06_train_ddp: model and samples, and all of it in one process."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from ..exercise import generator

SAMPLES, BATCH = {"even": 24, "ragged": 23}, {"even": 4, "ragged": 5}
EPOCHS, RATE = 3, 0.5


def model_of(seed: int, rank: int) -> nn.Module:
    torch.manual_seed(seed + rank)  # each rank brings weights of its own
    layers = [nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


class Samples(Dataset):
    """Random samples; notes which indices it was asked for."""

    def __init__(self, seed: int, length: int):
        draw = generator(seed, length)
        self.x = torch.randn(length, 6, generator=draw, dtype=torch.float64)
        self.y = torch.randint(3, (length,), generator=draw)
        self.asked = []

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        self.asked.append(int(index))
        return self.x[index], self.y[index]


def shuffle_seed(seed: int) -> int:
    return seed % 1000 + 1  # never 0, the sampler's default


class Simulated:
    """The training in one process, with a model for each rank, as it should be or with a change."""

    def __init__(self, seed, kind, world_size, **change):
        self.seed, self.kind, self.world_size, self.change = seed, kind, world_size, change
        self.dataset = Samples(seed, SAMPLES[kind])
        self.batch = change.get("batch", BATCH[kind])
        self.models = [
            model_of(seed, rank if change.get("own_start") else 0) for rank in range(world_size)
        ]
        self.steps = []  # of each epoch: for each step each rank's (mean loss, samples)
        for epoch in range(EPOCHS):
            self.steps.append(self._epoch([self._part(epoch, rank) for rank in range(world_size)]))

    def _part(self, epoch, rank) -> list:
        change, length = self.change, len(self.dataset)
        if change.get("no_sampler"):
            return list(range(length))
        sampler = DistributedSampler(
            self.dataset,
            self.world_size,
            rank,
            shuffle=change.get("shuffle", True),
            seed=change.get("shuffle_seed", shuffle_seed(self.seed)),
            drop_last=change.get("drop_last", False),
        )
        sampler.set_epoch(change.get("epoch", lambda epoch: epoch)(epoch))
        part = list(sampler)
        whole = len(part) // self.batch * self.batch
        return part[:whole] if change.get("drop_batch") else part

    def _epoch(self, parts) -> list:
        steps = []
        for start in range(0, len(parts[0]), self.batch):
            picked = [part[start : start + self.batch] for part in parts]
            steps.append([self._backward(*pair) for pair in zip(self.models, picked, strict=True)])
            self._step()
        return steps

    def _backward(self, model, picked):
        loss = F.cross_entropy(model(self.dataset.x[picked]), self.dataset.y[picked])
        (loss * (len(picked) if self.change.get("summed") else 1)).backward()
        return loss.item(), len(picked)

    @torch.no_grad()
    def _step(self):
        rate = RATE * self.change.get("rate", 1)
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            if not same[0].requires_grad:
                continue
            if not self.change.get("alone"):
                mean = sum(p.grad for p in same) / len(same)
                for p in same:
                    p.grad.copy_(mean)
            for p in same:
                p -= rate * p.grad
                if not self.change.get("keep_gradients"):
                    p.grad = None

    def weights(self, rank: int) -> dict:
        return {name: w.detach() for name, w in self.models[rank].state_dict().items()}
