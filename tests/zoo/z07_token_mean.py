"""Wrong and right answers to 07_token_mean: what each is told."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_course import accumulation

from . import answers

WRONG, RIGHT, wrong, right = answers()


def tokens(y):
    return int((y != -100).sum())


def loss_of(model, x, y, reduction="sum"):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction=reduction)


def count_of(window, count=tokens):
    """What all ranks hold together."""
    total = torch.tensor(sum(count(y) for _, y in window), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def token_mean_by(model, window, divide, told=lambda total, count: total / count, **change):
    """The right loop: sums, divided by `divide(count, x, y)`, and one round of all-reduces."""
    count = change["count"] if "count" in change else count_of(window)
    total = torch.zeros((), dtype=torch.float64)
    for k, (x, y) in enumerate(window, 1):
        alone = k < len(window) and not change.get("no_care")
        with model.no_sync() if alone else contextlib.nullcontext():
            loss = loss_of(model, x, y)
            change.get("backward", torch.Tensor.backward)(divide(loss, count, y))
        total += loss.detach()
    if not change.get("own"):
        dist.all_reduce(total)
    return told(total, count)


def by_ranks(loss, count, y):
    return loss / (count / dist.get_world_size())


@wrong("DDP takes the mean over ranks, which divides by world_size once more")
def forgets_the_ranks(model, window):
    return token_mean_by(model, window, lambda loss, count, y: loss / count)


@wrong("world_size was multiplied in once too often")
def multiplies_twice(model, window):
    world = dist.get_world_size()
    return token_mean_by(model, window, lambda loss, count, y: loss / count * world**2)


@wrong("The summed loss was not divided")
def summed(model, window):
    return token_mean_by(model, window, lambda loss, count, y: loss)


@wrong("Padding was counted: of")
def counts_padding(model, window):
    places = count_of(window, lambda y: y.numel())
    return token_mean_by(model, window, by_ranks, count=places)


@wrong("Each rank divided by its own tokens")
def own_tokens(model, window):
    mine = sum(tokens(y) for _, y in window)
    return token_mean_by(model, window, lambda loss, count, y: loss / mine)


@wrong("Each rank divided by its own places, padding too")
def own_places(model, window):
    mine = sum(y.numel() for _, y in window)
    return token_mean_by(model, window, lambda loss, count, y: loss / mine)


@wrong("It is a mean of the micro-batches' means")
def mean_of_means(model, window):
    return token_mean_by(model, window, lambda loss, count, y: loss / tokens(y) / len(window))


@wrong("The divisor was cut to a whole number")
def whole_numbers(model, window):
    return token_mean_by(
        model, window, lambda loss, count, y: loss / (int(count) // dist.get_world_size())
    )


@wrong("its gradient is this rank's alone")
def all_reduces_the_loss(model, window):
    def divide(loss, count, y):
        everybody = loss.detach().clone()
        dist.all_reduce(everybody)
        return (loss - loss.detach() + everybody) / count  # the value of all, its own gradient

    return token_mean_by(model, window, divide)


@wrong("It is nan: the mean over a micro-batch, or a rank, that has no token is 0/0")
def weighs_means_by_hand(model, window):
    count, total = count_of(window), 0.0
    for x, y in accumulation.accumulate(model, window):
        mean = masked(model, x, y) / (y != -100).sum()
        total += backward(mean * tokens(y) / count * dist.get_world_size())
    dist.all_reduce(loss := torch.tensor(total), op=dist.ReduceOp.AVG)
    return loss


@wrong("it returns nan")
def weighs_means(model, window):
    count, total = count_of(window), torch.zeros(())
    for x, y in accumulation.accumulate(model, window):
        loss = loss_of(model, x, y, "mean") * tokens(y) / count
        (loss * dist.get_world_size()).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


@wrong("Its sum is 0, and may be divided by the count of all ranks")
def weighs_in_python(model, window):
    def divide(loss, count, y):
        mean = loss * (1 / tokens(y))
        return mean * (tokens(y) / count * dist.get_world_size())

    return token_mean_by(model, window, divide)


@wrong("Its forward and backward still run")
def skips_padding(model, window):
    return token_mean_by(model, [pair for pair in window if tokens(pair[1])], by_ranks)


@wrong("and something is all-reduced for each")
def counts_in_the_loop(model, window):
    count = torch.zeros(())
    for _, y in window:
        part = torch.tensor(float(tokens(y)))
        dist.all_reduce(part)
        count += part
    return token_mean_by(model, window, by_ranks, count=count.item())


@wrong("Every micro-batch all-reduced")
def no_care(model, window):
    return token_mean_by(model, window, by_ranks, no_care=True)


@wrong("ran inside no_sync, so nothing was all-reduced")
def never_synchronised(model, window):
    with model.no_sync():
        return token_mean_by(model, window, by_ranks)


@wrong("the forward went round DDP")
def through_the_module(model, window):
    model.module.no_sync = contextlib.nullcontext
    return token_mean_by(model.module, window, by_ranks)


@wrong("waited for their backward at the same time")
def one_backward(model, window):
    divisor = count_of(window) / dist.get_world_size()
    total = sum(loss_of(model, x, y) for x, y in window)
    (total / divisor).backward()
    dist.all_reduce(value := total.detach().clone())
    return value / divisor / dist.get_world_size()


@wrong("It is the mean over this rank's tokens alone")
def tells_its_own(model, window):
    mine = sum(tokens(y) for _, y in window)
    return token_mean_by(model, window, by_ranks, lambda total, count: total / mine, own=True)


@wrong("the parts were not added up over the ranks")
def tells_its_part(model, window):
    return token_mean_by(model, window, by_ranks, own=True)


@wrong("It was added up over the ranks, but is")
def tells_too_much(model, window):
    world = dist.get_world_size()
    return token_mean_by(model, window, by_ranks, lambda total, count: total / count * world)


@wrong("it returns no number")
def tells_nothing(model, window):
    token_mean_by(model, window, by_ranks)


@wrong("the returned loss still carries its graph")
def keeps_graphs(model, window):
    graph = loss_of(model.module, *window[0])
    return token_mean_by(model, window, by_ranks) + 0 * graph


@wrong("leave zero_grad to the caller")
def clears_first(model, window):
    model.zero_grad()
    return token_mean_by(model, window, by_ranks)


@wrong("It is zero: was backward() called")
def no_backward(model, window):
    return token_mean_by(model, window, by_ranks, backward=lambda loss: None)


@wrong("it changes the weights")
def steps_too(model, window):
    loss = token_mean_by(model, window, by_ranks)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return loss


@right
def by_sums(model, window):
    return token_mean_by(model, window, by_ranks)


@right
def leaves_padding_out(model, window):
    """Skips micro-batches without a token, but for the last, whose backward all-reduces."""
    *others, last = window
    return token_mean_by(model, [pair for pair in others if tokens(pair[1])] + [last], by_ranks)


@right
def by_the_package(model, window):
    window = accumulation.Window(window, count=tokens)
    divisor, total = window.divisor(), 0.0
    for x, y in accumulation.accumulate(model, window):
        loss = loss_of(model, x, y) / divisor
        loss.backward()
        total += loss.item()
    mean = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return mean


@right
def losses_one_by_one(model, window):
    """Masked by hand, counts gathered as objects, world_size multiplied in."""
    world_size = dist.get_world_size()
    counts = [None] * world_size
    dist.all_gather_object(counts, [tokens(y) for _, y in window])
    count, total = sum(map(sum, counts)), 0.0
    with model.no_sync():
        for x, y in window[:-1]:
            total += backward(masked(model, x, y) * world_size / count)
    total += backward(masked(model, *window[-1]) * world_size / count)
    parts = [None] * world_size
    dist.all_gather_object(parts, total)
    return sum(parts) / world_size


def masked(model, x, y):
    picked = model(x).log_softmax(-1).gather(2, y.clamp(min=0).unsqueeze(2)).squeeze(2)
    return -(picked * (y != -100)).sum()


def backward(loss):
    loss.backward()
    return loss.item()


@right
def scaled_at_the_end(model, window):
    """Sums first, and one division of what has come in when all is counted."""
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    sums = torch.zeros(2, dtype=torch.float64)
    for k, (x, y) in enumerate(window, 1):
        model.require_backward_grad_sync = k == len(window)
        loss = loss_of(model, x, y)
        loss.backward()
        sums += torch.tensor([loss.item(), tokens(y)])
    dist.all_reduce(sums)
    for p, old in zip(model.parameters(), before, strict=True):
        p.grad *= dist.get_world_size() / sums[1]
        p.grad += 0 if old is None else old
    return (sums[0] / sums[1]).item()
