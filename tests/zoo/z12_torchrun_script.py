"""Wrong and right answers to 12_torchrun_script: what each is told."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from . import answers

WRONG, RIGHT, wrong, right = answers()


class Job:
    """The right job, in parts to change."""

    def __call__(self, build, dataset, folder, epochs, global_batch, learning_rate):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.path = os.path.join(folder, "snapshot.pt")
        self.network = build(self.gpu())
        self.model = self.wrap()
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), self.rate(learning_rate), momentum=0.9
        )
        done = self.load() if os.path.exists(self.path) else 0
        sampler, loader = self.loader(dataset, global_batch)
        losses = []
        for epoch in range(done, epochs):
            sampler.set_epoch(self.number(epoch, done))
            losses.append(self.epoch(loader))
            self.after(epoch)
        return self.weights(), losses

    def gpu(self):
        return int(os.environ["LOCAL_RANK"])

    def wrap(self):
        return DistributedDataParallel(self.network)

    def rate(self, learning_rate):
        return learning_rate

    def load(self):
        state = torch.load(self.path)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["done"]

    def loader(self, dataset, global_batch):
        sampler = DistributedSampler(dataset)
        return sampler, DataLoader(dataset, self.share(global_batch), sampler=sampler)

    def share(self, global_batch):
        return global_batch // self.world_size

    def number(self, epoch, done):
        return epoch

    def epoch(self, loader):
        self.total, self.last = torch.zeros(2, dtype=torch.float64), 0.0
        for x, y in loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.total += torch.tensor([loss.item() * len(y), len(y)])
        return self.mean()

    def mean(self):
        dist.all_reduce(self.total)
        return (self.total[0] / self.total[1]).item()

    def after(self, epoch):
        if dist.get_rank() == 0:
            self.save(epoch)

    def save(self, epoch):
        torch.save(self.state(epoch), self.path + ".tmp")
        os.replace(self.path + ".tmp", self.path)

    def state(self, epoch):
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return parts | {"done": epoch + 1}

    def weights(self):
        return self.network.state_dict()


def function(job):
    """Return the function of a class of jobs."""

    def train_job(build, dataset, folder, epochs, global_batch, learning_rate):
        return job()(build, dataset, folder, epochs, global_batch, learning_rate)

    train_job.__name__ = job.__name__
    return train_job


def changed(message):
    return lambda job: wrong(message)(function(job))


@changed("The number of a GPU is the LOCAL_RANK")
class RankAsGpu(Job):
    def gpu(self):
        return self.rank


@changed("once, on the one of its LOCAL_RANK, 1")
class AlwaysTheFirstGpu(Job):
    def gpu(self):
        return 0


@changed("only rank 0 saves")
class AllSave(Job):
    def after(self, epoch):
        self.save(epoch)


@changed("save one after every epoch")
class NeverSaves(Job):
    def after(self, epoch):
        pass


@changed("there is no snapshot in rank 0's folder")
class SavesAtTheEnd(Job):
    def after(self, epoch):
        if epoch == 3 and self.rank == 0:
            self.save(epoch)


@changed("it begins with epoch 0: no snapshot is loaded")
class NeverResumes(Job):
    def load(self):
        return 0


@changed("a finished epoch is done twice")
class RepeatsAnEpoch(Job):
    def state(self, epoch):
        return super().state(epoch) | {"done": epoch}


@changed("the one that was interrupted has to be done anew")
class SkipsAnEpoch(Job):
    def state(self, epoch):
        return super().state(epoch) | {"done": epoch + 2}


@changed("The optimizer's state (its momentum)")
class ForgetsTheMomentum(Job):
    def load(self):
        state = torch.load(self.path)
        self.network.load_state_dict(state["network"])
        return state["done"]


@changed("it trained from new weights")
class ForgetsTheWeights(Job):
    def load(self):
        return torch.load(self.path)["done"]


@changed("*every* rank has to load the snapshot")
class OnlyRank0Loads(Job):
    def load(self):
        box = [super().load() if self.rank == 0 else None]
        dist.broadcast_object_list(box)
        for weight in self.network.state_dict().values():
            dist.broadcast(weight, 0)
        return box[0]


@changed("set_epoch counted from 0 again")
class CountsFrom0(Job):
    def number(self, epoch, done):
        return epoch - done


@changed("Every epoch had the order of epoch 0")
class NoSetEpoch(Job):
    def number(self, epoch, done):
        return 0


@changed("The samples were not shuffled")
class NoShuffle(Job):
    def loader(self, dataset, global_batch):
        sampler = DistributedSampler(dataset, shuffle=False)
        return sampler, DataLoader(dataset, self.share(global_batch), sampler=sampler)


@changed("the *global* batch: with 2 ranks its share is")
class GlobalBatchEach(Job):
    def share(self, global_batch):
        return global_batch


@changed("compute a rank's share from the world size of *now*")
class KeepsItsShare(Job):
    """Takes the share that the first start had, from the snapshot."""

    def share(self, global_batch):
        there = os.path.exists(self.path)
        self.kept = torch.load(self.path)["share"] if there else super().share(global_batch)
        return self.kept

    def state(self, epoch):
        return super().state(epoch) | {"share": self.kept}


@changed("The learning rate was 2 times the one that was given")
class ScalesTheRate(Job):
    def rate(self, learning_rate):
        return learning_rate * self.world_size


@changed("are the gradients averaged (DDP)?")
class NoDdp(Job):
    def wrap(self):
        return self.network


@changed("Each rank tells its own loss")
class OwnLoss(Job):
    def mean(self):
        return (self.total[0] / self.total[1]).item()


@changed("The ranks' losses were added up, not averaged")
class SummedLoss(Job):
    def mean(self):
        return self.world_size * super().mean()


@changed("not those of the network itself")
class WrappedNames(Job):
    def weights(self):
        return self.model.state_dict()


@changed("write beside it, then os.replace")
class OverwritesTheFile(Job):
    def save(self, epoch):
        torch.save(self.state(epoch), self.path)


@changed("Likely: a rank waits in a collective")
class BarrierOnRank0(Job):
    def save(self, epoch):
        super().save(epoch)
        dist.barrier()


@changed("not (state_dict, losses)")
class ReturnsWeights(Job):
    def __call__(self, *arguments):
        return super().__call__(*arguments)[0]


@changed("The process group is up already")
class SetsUpAnother(Job):
    def __call__(self, *arguments):
        dist.init_process_group("gloo")
        return super().__call__(*arguments)


right(function(Job))


@right
def with_files_by_epoch(build, dataset, folder, epochs, global_batch, learning_rate):
    """A file for each epoch; gradients averaged by hand; loads before anything else."""
    network = build(int(os.environ["LOCAL_RANK"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate, momentum=0.9)
    files = sorted(Path(folder).glob("after-*.pt"))
    epoch = 0
    if files:
        weights, momentum = torch.load(files[-1])
        network.load_state_dict(weights)
        optimizer.load_state_dict(momentum)
        epoch = int(files[-1].stem[6:])
    for weight in network.parameters():
        dist.broadcast(weight.data, src=0)
    n, rank, losses = dist.get_world_size(), dist.get_rank(), []
    while epoch < epochs:
        draw = torch.Generator().manual_seed(epoch)
        mine = torch.randperm(len(dataset), generator=draw).tolist()[rank::n]
        means = []
        for start in range(0, len(mine), global_batch // n):
            picked = [dataset[i] for i in mine[start : start + global_batch // n]]
            x, y = (torch.stack(parts) for parts in zip(*picked, strict=True))
            loss = F.cross_entropy(network(x), y)
            network.zero_grad()
            loss.backward()
            for weight in network.parameters():
                dist.all_reduce(weight.grad)
                weight.grad /= n
            optimizer.step()
            means.append(loss.detach())
        mean = torch.stack(means).mean()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean)
        epoch += 1
        if rank == 0:
            part = Path(folder, "part")
            torch.save((network.state_dict(), optimizer.state_dict()), part)
            part.rename(Path(folder, f"after-{epoch:04}.pt"))
    return network.state_dict(), losses


@right
def with_the_package(build, dataset, folder, epochs, global_batch, learning_rate):
    """Checkpoint and shards of the course's package."""
    from ddp_course import checkpoint, data

    network = build(int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate, momentum=0.9)
    path, parts = Path(folder, "run.pt"), {"model": model, "optimizer": optimizer}
    done = checkpoint.load(path, **parts, any_world_size=True)["epoch"] if path.exists() else 0
    loader = data.shard(dataset, global_batch // dist.get_world_size())
    losses = []
    for epoch in range(done, epochs):
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, total)
        losses.append(sum(every) / len(every))
        checkpoint.save(path, **parts, epoch=epoch + 1)
    return network.state_dict(), losses
