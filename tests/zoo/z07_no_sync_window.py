"""Wrong and right answers to 07_no_sync_window: what each is told."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_course import accumulation

from . import answers

WRONG, RIGHT, wrong, right = answers()


def share(ddp_model, window, x, y):
    """A micro-batch's part of the mean loss over the window."""
    return F.cross_entropy(ddp_model(x), y, reduction="sum") / sum(len(y) for _, y in window)


def quiet(ddp_model, window, part=share, backward=lambda loss: loss.backward()):
    """The right placement, with parts to change."""
    with ddp_model.no_sync():
        for x, y in window[:-1]:
            backward(part(ddp_model, window, x, y))
    backward(part(ddp_model, window, *window[-1]))


@wrong("Every micro-batch all-reduced")
def no_care(ddp_model, window):
    for x, y in window:
        share(ddp_model, window, x, y).backward()


@wrong("but the forwards ran outside it")
def around_backward(ddp_model, window):
    for k, (x, y) in enumerate(window):
        loss = share(ddp_model, window, x, y)
        with ddp_model.no_sync() if k < len(window) - 1 else contextlib.nullcontext():
            loss.backward()


@wrong("the last one too, ran inside no_sync")
def around_all(ddp_model, window):
    with ddp_model.no_sync():
        for x, y in window:
            share(ddp_model, window, x, y).backward()


@wrong("only the first was all-reduced")
def first_instead_of_last(ddp_model, window):
    for k, (x, y) in enumerate(window):
        with ddp_model.no_sync() if k else contextlib.nullcontext():
            share(ddp_model, window, x, y).backward()


@wrong("Of the micro-batches only number 2 was all-reduced")
def off_by_some(ddp_model, window):
    for k, (x, y) in enumerate(window):
        with contextlib.nullcontext() if k == 1 else ddp_model.no_sync():
            share(ddp_model, window, x, y).backward()


@wrong("the forward reads the flag: set it before")
def flag_after_forward(ddp_model, window):
    for k, (x, y) in enumerate(window, 1):
        loss = share(ddp_model, window, x, y)
        ddp_model.require_backward_grad_sync = k == len(window)
        loss.backward()


@wrong("DDP's all-reduce has taken the mean over the ranks already")
def divides_by_the_ranks(ddp_model, window):
    def part(*args):
        return share(*args) / dist.get_world_size()

    quiet(ddp_model, window, part)


@wrong("4× the large batch's: the loss was not divided by the number of micro-batches")
def not_divided(ddp_model, window):
    quiet(ddp_model, window, lambda model, window, x, y: F.cross_entropy(model(x), y))


@wrong("16× the large batch's: the sum was not divided by the samples")
def summed(ddp_model, window):
    def part(model, window, x, y):
        return F.cross_entropy(model(x), y, reduction="sum")

    quiet(ddp_model, window, part)


@wrong("the mean of the micro-batches' means")
def mean_of_means(ddp_model, window):
    def part(model, window, x, y):
        return F.cross_entropy(model(x), y) / len(window)

    quiet(ddp_model, window, part)


@wrong("An all-reduce by hand comes on top of DDP's own")
def reduces_again(ddp_model, window):
    quiet(ddp_model, window)
    for p in ddp_model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


@wrong("after DDP's mean something was summed")
def sums_again(ddp_model, window):
    quiet(ddp_model, window)
    for p in ddp_model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


@wrong("the forward went round DDP")
def through_the_module(ddp_model, window):
    with ddp_model.no_sync():
        for x, y in window[:-1]:
            share(ddp_model.module, window, x, y).backward()
    share(ddp_model.module, window, *window[-1]).backward()


@wrong("Only the last micro-batch is in it")
def clears_in_between(ddp_model, window):
    def backward(loss):
        ddp_model.zero_grad()
        loss.backward()

    quiet(ddp_model, window, backward=backward)


@wrong("a second window does not add to the gradients of the first")
def clears_first(ddp_model, window):
    ddp_model.zero_grad()
    quiet(ddp_model, window)


def clip(ddp_model, max_norm):
    torch.nn.utils.clip_grad_norm_(ddp_model.parameters(), max_norm)


@wrong("as if clipped")
def clips(ddp_model, window):
    quiet(ddp_model, window)
    clip(ddp_model, 0.05)


@wrong("after a second window it is shorter than the sum of both")
def clips_the_second(ddp_model, window):
    quiet(ddp_model, window)
    clip(ddp_model, 0.5)


@wrong("it changes the weights")
def steps_too(ddp_model, window):
    quiet(ddp_model, window)
    torch.optim.SGD(ddp_model.parameters(), 0.1).step()


@wrong("waited for their backward at the same time")
def one_backward(ddp_model, window):
    sum(share(ddp_model, window, x, y) for x, y in window).backward()


@wrong("one forward took several micro-batches at once")
def one_batch(ddp_model, window):
    x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
    F.cross_entropy(ddp_model(x), y).backward()


@wrong("it leaves synchronisation off")
def leaves_it_off(ddp_model, window):
    for k, (x, y) in enumerate(window):
        ddp_model.require_backward_grad_sync = k == len(window) - 1
        share(ddp_model, window, x, y).backward()
    ddp_model.require_backward_grad_sync = False


@wrong("Who calls a collective for each of them calls more than the others do")
def logs_each_loss(ddp_model, window):
    def backward(loss):
        loss.backward()
        dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)

    quiet(ddp_model, window, backward=backward)


@wrong("It is zero: was backward() called")
def no_backward(ddp_model, window):
    quiet(ddp_model, window, backward=lambda loss: loss.item())


right(quiet)


@right
def in_one_loop(ddp_model, window):
    samples, last = sum(len(y) for _, y in window), len(window) - 1
    for k, (x, y) in enumerate(window):
        with contextlib.ExitStack() as stack:
            if k != last:
                stack.enter_context(ddp_model.no_sync())
            (F.cross_entropy(ddp_model(x), y) * len(y) / samples).backward()


@right
def by_the_package(ddp_model, window):
    window = accumulation.Window(window)
    divisor = window.divisor()  # a count crosses: no round of gradients
    for x, y in accumulation.accumulate(ddp_model, window):
        (F.cross_entropy(ddp_model(x), y, reduction="sum") / divisor).backward()


@right
def by_the_flag(ddp_model, window):
    samples = sum(len(y) for _, y in window)
    try:
        for k, (x, y) in enumerate(window, 1):
            ddp_model.require_backward_grad_sync = k == len(window)  # before the forward
            losses = F.cross_entropy(ddp_model(x), y, reduction="none")
            losses.sum().div(samples).backward()
    finally:
        ddp_model.require_backward_grad_sync = True


@right
def all_reduced_by_hand(ddp_model, window):
    for x, y in window:
        share(ddp_model.module, window, x, y).backward()
    gradients = [p.grad for p in ddp_model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
