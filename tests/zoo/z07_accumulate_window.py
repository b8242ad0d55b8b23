"""Wrong and right answers to 07_accumulate_window: what each is told."""

import torch
import torch.nn.functional as F

from . import answers

WRONG, RIGHT, wrong, right = answers()


@wrong("4× the large batch's: the loss was not divided by the number of micro-batches")
def not_divided(model, window):
    return sum(_backward(F.cross_entropy(model(x), y)) for x, y in window) / len(window)


def _backward(loss):
    loss.backward()
    return loss.item()


@wrong("32× the large batch's: the summed loss was not divided by the number of samples")
def summed(model, window):
    return sum(_backward(F.cross_entropy(model(x), y, reduction="sum")) for x, y in window)


@wrong("4× too small: it was divided by the number of micro-batches twice")
def divided_twice(model, window):
    return sum(_backward(F.cross_entropy(model(x), y) / len(window) ** 2) for x, y in window)


@wrong("the mean of the micro-batches' means")
def mean_of_means(model, window):
    return sum(_backward(F.cross_entropy(model(x), y) / len(window)) for x, y in window)


@wrong("Only the last micro-batch is in it")
def cleared_in_between(model, window):
    samples = sum(len(y) for _, y in window)
    for x, y in window:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward()
    return loss.item()


@wrong("Only the first micro-batch is in it")
def backward_once(model, window):
    x, y = window[0]
    return _backward(F.cross_entropy(model(x), y))


@wrong("The last micro-batch is not in it: it was dropped")
def last_dropped(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window[:-1] or window:
        total += _backward(F.cross_entropy(model(x), y, reduction="sum") / samples)
    return total


@wrong("It is zero: was backward() called")
def no_backward(model, window):
    return sum(F.cross_entropy(model(x), y).item() for x, y in window)


@wrong("still carries its graph")
def keeps_graphs(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward(retain_graph=True)
        total = total + loss
    return total


@wrong("leave zero_grad to the caller")
def clears_first(model, window):
    model.zero_grad()
    return one_batch(model, window)


@wrong("it changes the weights")
def steps_too(model, window):
    loss = one_batch(model, window)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return loss


@wrong("it should return the window's mean loss")
def returns_nothing(model, window):
    one_batch(model, window)


@wrong("the returned mean loss is off")
def returns_the_last_loss(model, window):
    samples = sum(len(y) for _, y in window)
    for x, y in window:
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward()
    return loss.item()


@wrong("as if clipped")
def clips(model, window):
    loss = weighted_means(model, window)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return loss


@wrong("after a second window it is shorter than the sum of both")
def clips_the_second(model, window):
    loss = weighted_means(model, window)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    return loss


@wrong("as if all of .grad had been clipped, or divided")
def divides_all_at_the_end(model, window):
    total = sum(_backward(F.cross_entropy(model(x), y, reduction="sum")) for x, y in window)
    samples = sum(len(y) for _, y in window)
    for p in model.parameters():
        p.grad /= samples
    return total / samples


@wrong("micro-batches waited for their backward at the same time")
def one_backward(model, window):
    samples = sum(len(y) for _, y in window)
    losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in window]
    return _backward(sum(losses) / samples)


@wrong("one forward took several micro-batches at once")
def one_batch(model, window):
    x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
    return _backward(F.cross_entropy(model(x), y))


@right
def weighted_means(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        total += _backward(F.cross_entropy(model(x), y) * (len(y) / samples))
    return total


@wrong("neither cleared nor clipped nor divided")
def clips_inside(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        total += _backward(F.cross_entropy(model(x), y, reduction="sum") / samples)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.4)
    return total


@right
def losses_one_by_one(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        part = F.nll_loss(model(x).log_softmax(1), y, reduction="none").sum() / samples
        total += _backward(part)
    return torch.tensor(total)


@right
def divided_at_the_end(model, window):
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = torch.zeros(())
    for x, y in window:
        loss = F.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        total = total + loss.detach()
    samples = sum(len(y) for _, y in window)
    for p, old in zip(model.parameters(), before, strict=True):
        p.grad /= samples
        if old is not None:
            p.grad += old
    return total / samples
