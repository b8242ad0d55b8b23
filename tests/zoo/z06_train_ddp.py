"""Wrong and right answers to 06_train_ddp: what each is told."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from ddp_course import data

from . import answers

WRONG, RIGHT, wrong, right = answers()


class Loop:
    """The right loop, in parts to change."""

    def __call__(self, model, dataset, epochs, batch_size, learning_rate, seed):
        self.model, self.dataset = model, dataset
        sampler, loader = self.loader(dataset, batch_size, seed)
        self.ddp_model = self.wrap(model)
        optimizer = self.optimizer(learning_rate)
        losses = []
        for epoch in range(epochs):
            self.new_epoch(sampler, epoch)
            self.sums, self.means = torch.zeros(2, dtype=torch.float64), []
            for x, y in loader:
                loss = self.loss(x, y)
                loss.backward()
                optimizer.step()
                self.clear(optimizer)
                self.note(loss.detach(), len(y))
            losses.append(self.of_epoch())
        return self.state(), losses

    def loader(self, dataset, batch_size, seed):
        sampler = DistributedSampler(dataset, seed=seed)
        return sampler, DataLoader(dataset, batch_size, sampler=sampler)

    def wrap(self, model):
        return DistributedDataParallel(model)

    def optimizer(self, learning_rate):
        return torch.optim.SGD(self.ddp_model.parameters(), learning_rate)

    def new_epoch(self, sampler, epoch):
        sampler.set_epoch(epoch)

    def loss(self, x, y):
        return F.cross_entropy(self.ddp_model(x), y)

    def clear(self, optimizer):
        optimizer.zero_grad()

    def note(self, loss, count):
        self.sums += torch.stack([loss * count, torch.tensor(float(count))])
        self.means.append(loss)

    def of_epoch(self):
        dist.all_reduce(self.sums)
        return (self.sums[0] / self.sums[1]).item()

    def state(self):
        return self.ddp_model.module.state_dict()


def changed(message):
    """Add the loop with the parts that a class changes to the wrong answers."""

    def keep(loop):
        def train_ddp(model, dataset, epochs, batch_size, learning_rate, seed):
            return loop()(model, dataset, epochs, batch_size, learning_rate, seed)

        train_ddp.__name__ = loop.__name__
        return wrong(message)(train_ddp)

    return keep


@changed("call sampler.set_epoch(epoch)")
class ForgetsSetEpoch(Loop):
    def new_epoch(self, sampler, epoch):
        pass


@changed("set_epoch counted from 1")
class CountsFromOne(Loop):
    def new_epoch(self, sampler, epoch):
        sampler.set_epoch(epoch + 1)


@changed("Every rank goes through all samples")
class NoSampler(Loop):
    def loader(self, dataset, batch_size, seed):
        return None, DataLoader(dataset, batch_size, shuffle=True)

    def new_epoch(self, sampler, epoch):
        pass


@changed("A loader takes either a sampler or shuffle=True")
class ShufflesTwice(Loop):
    def loader(self, dataset, batch_size, seed):
        sampler = DistributedSampler(dataset, seed=seed)
        return sampler, DataLoader(dataset, batch_size, sampler=sampler, shuffle=True)


@changed("The samples were not shuffled")
class InOrder(Loop):
    def loader(self, dataset, batch_size, seed):
        sampler = DistributedSampler(dataset, shuffle=False, seed=seed)
        return sampler, DataLoader(dataset, batch_size, sampler=sampler)


@changed("The order is not that of `seed`")
class ForgetsTheSeed(Loop):
    def loader(self, dataset, batch_size, seed):
        return super().loader(dataset, batch_size, 0)


@changed("batch_size is meant for each rank")
class SharesTheBatch(Loop):
    def loader(self, dataset, batch_size, seed):
        return super().loader(dataset, batch_size // dist.get_world_size(), seed)


@changed("by the loader's drop_last")
class DropsTheLast(Loop):
    def loader(self, dataset, batch_size, seed):
        sampler = DistributedSampler(dataset, seed=seed)
        return sampler, DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)


@changed("the sampler's drop_last should be False")
class DropsTheRest(Loop):
    def loader(self, dataset, batch_size, seed):
        sampler = DistributedSampler(dataset, seed=seed, drop_last=True)
        return sampler, DataLoader(dataset, batch_size, sampler=sampler)


class Bare(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@changed("the model was not wrapped in DDP")
class NoDDP(Loop):
    def wrap(self, model):
        return Bare(model)


@changed("the forward has to go through the wrapper")
class RoundTheWrapper(Loop):
    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y)


@changed("each rank began with weights of its own")
class AveragesByHand(Loop):
    def wrap(self, model):
        return Bare(model)

    def loss(self, x, y):
        for p in self.model.parameters():
            if p.requires_grad:
                p.grad = None
                p.register_hook(average) if not hasattr(p, "hooked") else None
                p.hooked = True
        return super().loss(x, y)


def average(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    return gradient


@changed("zero_grad() is missing in the loop")
class NeverClears(Loop):
    def clear(self, optimizer):
        pass


@changed("does the optimizer hold the parameters of this model?")
class OtherParameters(Loop):
    def optimizer(self, learning_rate):
        return torch.optim.SGD(copy.deepcopy(self.model).parameters(), learning_rate)


@changed("The learning rate was 2 times the one that was given")
class ScalesTheRate(Loop):
    def optimizer(self, learning_rate):
        return super().optimizer(learning_rate * dist.get_world_size())


@changed("DDP's mean was divided once more")
class DividesByTheRanks(Loop):
    def loss(self, x, y):
        return super().loss(x, y) / dist.get_world_size()


@changed("The losses were summed over a batch")
class Sums(Loop):
    def loss(self, x, y):
        return F.cross_entropy(self.ddp_model(x), y, reduction="sum")


@changed("They are the wrapper's: return that of the bare network")
class SavesTheWrapper(Loop):
    def state(self):
        return self.ddp_model.state_dict()


@changed("no state_dict")
class ReturnsTheModel(Loop):
    def state(self):
        return list(self.model.parameters())


@changed("It is this rank's own loss")
class OwnLoss(Loop):
    def of_epoch(self):
        return (self.sums[0] / self.sums[1]).item()


@changed("weight by the number of samples")
class MeanOfMeans(Loop):
    def of_epoch(self):
        mean = torch.stack(self.means).mean()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        return mean.item()


@changed("It is the loss of the epoch's last step alone")
class LastLoss(Loop):
    def of_epoch(self):
        last = self.means[-1].clone()
        dist.all_reduce(last, op=dist.ReduceOp.AVG)
        return last.item()


@changed("The ranks' losses were added up, not averaged")
class SumOverRanks(Loop):
    def of_epoch(self):
        mean = self.sums[0] / self.sums[1]
        dist.all_reduce(mean)
        return mean.item()


@changed("with its padding the epoch processed more")
class DividesByTheSet(Loop):
    def of_epoch(self):
        dist.all_reduce(self.sums)
        return self.sums[0].item() / len(self.dataset)


@changed("The steps' losses were added up, not averaged")
class SumOverSteps(Loop):
    def of_epoch(self):
        total = torch.stack(self.means).sum()
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
        return total.item()


@changed("still carries its graph")
class KeepsGraphs(Loop):
    def loss(self, x, y):
        self.kept = super().loss(x, y)
        return self.kept

    def of_epoch(self):
        return super().of_epoch() + 0 * self.kept


@changed("Likely: not all ranks call a collective")
class TellsOnRank0(Loop):
    def of_epoch(self):
        return super().of_epoch() if dist.get_rank() == 0 else 0.0


@wrong("it returns nothing: return state_dict, losses")
def returns_nothing(model, dataset, epochs, batch_size, learning_rate, seed):
    Loop()(model, dataset, epochs, batch_size, learning_rate, seed)


@wrong("and there were 3 epochs: one for each")
def a_loss_for_each_step(model, dataset, epochs, batch_size, learning_rate, seed):
    class Steps(Loop):
        every = []

        def of_epoch(self):
            self.every += self.means

    weights, _ = Steps()(model, dataset, epochs, batch_size, learning_rate, seed)
    return weights, Steps.every


@right
def the_loop(model, dataset, epochs, batch_size, learning_rate, seed):
    return Loop()(model, dataset, epochs, batch_size, learning_rate, seed)


@right
def with_the_package(model, dataset, epochs, batch_size, learning_rate, seed):
    model = DistributedDataParallel(model)
    loader = data.shard(dataset, batch_size, seed=seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    losses = []
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        total, count = torch.zeros(()), 0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in trained:
                    p.sub_(learning_rate * p.grad)
                    p.grad = None
            total += len(y) * loss.detach()
            count += len(y)
        mean = total / count
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean)
    return model.module.state_dict(), losses


@right
def without_ddp(model, dataset, epochs, batch_size, learning_rate, seed):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], learning_rate)
    losses = torch.zeros(epochs, dtype=torch.float64)
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(len(dataset), generator=generator).tolist()
        order += order[: -len(order) % world_size]
        mine = order[rank::world_size]
        for x, y in DataLoader(Subset(dataset, mine), batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in optimizer.param_groups[0]["params"]:
                dist.all_reduce(p.grad)
                p.grad /= world_size
            optimizer.step()
            losses[epoch] += loss.item() * len(y) / len(order)
    dist.all_reduce(losses)
    return dict(model.named_parameters()), losses.tolist()


@right
def all_reduced_each_step(model, dataset, epochs, batch_size, learning_rate, seed):
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=learning_rate, foreach=True)
    sampler = DistributedSampler(dataset, shuffle=True, seed=seed)
    epoch_losses = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        weighted, seen = 0.0, 0
        for x, y in DataLoader(dataset, batch_size=batch_size, sampler=sampler):
            optimizer.zero_grad(set_to_none=False)
            loss = nn.CrossEntropyLoss()(wrapped(x), y)
            loss.backward()
            optimizer.step()
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG)
            weighted, seen = weighted + mean_loss.item() * len(x), seen + len(x)
        epoch_losses.append(weighted / seen)
    return model.state_dict(), epoch_losses
