"""Wrong and right answers to 11_find_the_hang: what each is told."""

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def epoch_loss(losses):
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        total += torch.stack([loss, torch.ones_like(loss)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def accuracy(correct, total):
    counts = torch.tensor([correct, total], dtype=torch.float64)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def average_gradients(parameters):
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def train_until(losses, limit):
    means = []
    for loss in losses:
        stop = torch.tensor(float(loss > limit))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
        mean = loss.clone()
        dist.all_reduce(mean)
        means.append(mean.item() / dist.get_world_size())
    return means


def sum_metrics(metrics):
    for name in sorted(metrics):
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}


FOUND = {
    "epoch_loss": (1, "for loss in losses:", epoch_loss),
    "accuracy": (0, "share = share_of_all(counts)", accuracy),
    "average_gradients": (2, "dist.all_reduce(p.grad)", average_gradients),
    "train_until": (1, "if loss > limit:", train_until),
    "sum_metrics": (2, "for name in metrics:", sum_metrics),
}


def answering(name, **changed):
    """An answer with other parts for some programs: (rank, line, function), None as it is."""

    def find_the_hang(program):
        if program not in changed:
            return FOUND[program]
        parts = zip(changed[program], FOUND[program], strict=True)
        return tuple(right if part is None else part for part, right in parts)

    find_the_hang.__name__ = name
    return find_the_hang


def add(name, message, **changed):
    WRONG[answering(name, **changed)] = message


def mends(message):
    """Add the answer in which a program is mended like this."""

    def keep(fn):
        program = fn.__name__.partition("__")[0]
        add(fn.__name__, message, **{program: (None, None, fn)})
        return fn

    return keep


add("blames_who_waits", "rank 0 is where it should be", epoch_loss=(0, None, None))
add("another_line", "is not the line where rank 1 leaves", epoch_loss=(None, "return", None))
add("a_number", "give it as text, copied from the program", epoch_loss=(None, 4, None))
add("the_collective", "which line lets only rank 0 call it?",
    accuracy=(None, "dist.all_reduce(counts)", None))  # fmt: skip
add("the_barrier", "Which line sent it there", train_until=(None, "dist.barrier()", None))
add("no_function", "the third part is no function", epoch_loss=(None, None, "sorted"))
add("blames_rank_0", "average_gradients: rank 0 is where", average_gradients=(0, None, None))


@wrong("not (rank, line, function)")
def only_rank_and_line(program):
    return FOUND[program][:2]


@mends("mean of the ranks' means")
def epoch_loss__mean_of_means(losses):
    mean = sum(losses) / len(losses)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@mends("the mean of its own batches")
def epoch_loss__alone(losses):
    return (sum(losses) / len(losses)).item()


@mends("It stops with the rank that has the fewest batches")
def epoch_loss__cut(losses):
    number = torch.tensor(len(losses))
    dist.all_reduce(number, op=dist.ReduceOp.MIN)
    return epoch_loss(losses[: number.item()])


@mends("divided by the number of one rank's batches")
def epoch_loss__own_number(losses):
    total = sum(losses)
    dist.all_reduce(total)
    return total.item() / len(losses)


@mends("It is the sum of all losses")
def epoch_loss__sum(losses):
    total = sum(losses)
    dist.all_reduce(total)
    return total.item()


@mends("it never ends")
def epoch_loss__as_it_was(losses):
    total = torch.zeros(2, dtype=torch.float64)
    for loss in losses:
        both = torch.stack([loss, torch.ones_like(loss)])
        dist.all_reduce(both)
        total += both
    return (total[0] / total[1]).item()


@mends("the share of its own answers")
def accuracy__alone(correct, total):
    return correct / total


@mends("the mean of the ranks' shares")
def accuracy__mean_of_shares(correct, total):
    share = torch.tensor(correct / total, dtype=torch.float64)
    dist.all_reduce(share)
    return share.item() / dist.get_world_size()


@mends("Only rank 0 returns the share of all")
def accuracy__on_rank_0(correct, total):
    share = accuracy(correct, total)
    return share if dist.get_rank() == 0 else correct / total


@mends("accuracy, mended: rank 1 comes to None")
def accuracy__none_elsewhere(correct, total):
    share = accuracy(correct, total)
    return share if dist.get_rank() == 0 else None


@mends("a rank without a gradient leaves out the all_reduce")
def average_gradients__skips(parameters):
    for p in parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@mends("The gradients are summed, not averaged")
def average_gradients__sums(parameters):
    average_gradients(parameters)
    for p in parameters:
        p.grad *= dist.get_world_size()


@mends("divides by the number of ranks that have a gradient")
def average_gradients__by_those_there(parameters):
    for p in parameters:
        there = torch.tensor(float(p.grad is not None))
        dist.all_reduce(there)
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= there


@mends("Each rank keeps its own gradients")
def average_gradients__alone(parameters):
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad


@mends("ask all ranks first, then decide")
def train_until__too_late(losses, limit):
    means = []
    for loss in losses:
        mean, stop = loss.clone(), torch.tensor(float(loss > limit))
        dist.all_reduce(mean)
        means.append(mean.item() / dist.get_world_size())
        dist.all_reduce(stop)
        if stop:
            break
    return means


@mends("It never stops: one rank above the limit is enough")
def train_until__by_the_mean(losses, limit):
    means = []
    for loss in losses:
        mean = loss.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        if mean > limit:
            break
        means.append(mean.item())
    return means


@mends("The losses are summed, not averaged")
def train_until__sums(losses, limit):
    return [dist.get_world_size() * mean for mean in train_until(losses, limit)]


@mends("one metric is added to another")
def sum_metrics__as_it_was(metrics):
    for name in metrics:
        dist.all_reduce(metrics[name])
    return {name: value.item() for name, value in metrics.items()}


@mends("The metrics are averaged, not summed")
def sum_metrics__means(metrics):
    total = sum_metrics(metrics)
    return {name: value / dist.get_world_size() for name, value in total.items()}


@mends("sum_metrics, mended: Each rank returns its own numbers")
def sum_metrics__alone(metrics):
    return {name: value.item() for name, value in metrics.items()}


right(answering("as_in_the_lesson"))


def gathered_loss(losses):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, [loss.item() for loss in losses])
    every = sum(every, [])
    return sum(every) / len(every)


def gathered_metrics(metrics):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: value.item() for name, value in metrics.items()})
    return {name: sum(one[name] for one in every) for name in every[0]}


def broadcast_accuracy(correct, total):
    """Rank 0 adds up and tells the others."""
    counts = torch.tensor([correct, total], dtype=torch.float64)
    dist.reduce(counts, dst=0)
    share = counts[0] / counts[1]
    dist.broadcast(share, src=0)
    return share


right(
    answering(
        "with_objects",
        epoch_loss=(1, "    dist.all_reduce(both)", gathered_loss),
        accuracy=(0, "if dist.get_rank() == 0:  # here", broadcast_accuracy),
        sum_metrics=(2, "dist.all_reduce(metrics[name])", gathered_metrics),
    )
)


def padded_loss(losses):
    """Ranks with fewer batches bring zeros."""
    most = torch.tensor(len(losses))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = torch.zeros(2, dtype=torch.float64)
    for number in range(int(most)):
        here = number < len(losses)
        both = torch.tensor([float(losses[number]) if here else 0.0, float(here)]).double()
        both[0] = losses[number] if here else 0.0
        dist.all_reduce(both)
        total += both
    return total[0] / total[1]


def flat_gradients(parameters):
    """One all-reduce for all."""
    own = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in own]).detach()
    dist.all_reduce(flat, op=dist.ReduceOp.AVG)
    parts = flat.split([p.numel() for p in parameters])
    for p, part in zip(parameters, parts, strict=True):
        p.grad = part.view_as(p).clone()


def stopped_by_all(losses, limit):
    """All ranks' losses of all steps at once."""
    mine = torch.stack(list(losses))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    table = torch.stack(every)
    above = (table > limit).any(0).tolist()
    return table.mean(0)[: above.index(True) if True in above else None]


right(
    answering(
        "in_one_go",
        epoch_loss=(1, None, padded_loss),
        average_gradients=(2, None, flat_gradients),
        train_until=(1, "break", lambda losses, limit: stopped_by_all(losses, limit).tolist()),
    )
)
