"""Wrong and right answers to 09_full_step: what each is told."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from . import answers

WRONG, RIGHT, wrong, right = answers()


def divisor_of(window):
    count = torch.tensor(float(sum(len(y) for _, y in window)))
    dist.all_reduce(count)
    return count.item() / dist.get_world_size()


def loss_of(model, x, y, divisor, dtype=torch.float16):
    with torch.amp.autocast("cpu", dtype=dtype):
        return F.cross_entropy(model(x), y, reduction="sum") / divisor


def finish(model, optimizer, scaler, schedule, max_norm):
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    stepped = scaler.get_scale() >= scale
    if stepped:
        schedule.step()
    return stepped


def step(divisor=divisor_of, end=finish, after=None, scale=None, syncs=None, dtype=torch.float16):
    """A full step with one thing changed.

    `after(model, optimizer, scaler, schedule, max_norm)` is called after each micro-batch.
    """
    syncs = syncs or (lambda index, count: index == count - 1)

    def full_step(model, optimizer, scaler, schedule, window, max_norm):
        total = divisor(window)
        for index, (x, y) in enumerate(window):
            quiet = contextlib.nullcontext() if syncs(index, len(window)) else model.no_sync()
            with quiet:
                loss = loss_of(model, x, y, total(y) if callable(total) else total, dtype)
                (scaler.scale(loss) if scale is None else loss * scale).backward()
            if after:
                after(model, optimizer, scaler, schedule, max_norm)
        return end(model, optimizer, scaler, schedule, max_norm)

    return full_step


def add(name, message, **change):
    fn = step(**change)
    fn.__name__ = name
    WRONG[fn] = message


def clips_first(model, optimizer, scaler, schedule, max_norm):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return finish(model, optimizer, scaler, schedule, float("inf"))


def clips_scaled(model, optimizer, scaler, schedule, max_norm):
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def to_one(model, optimizer, scaler, schedule, max_norm):
    return finish(model, optimizer, scaler, schedule, 1.0)


def unscales(model, optimizer, scaler, schedule, max_norm):
    scaler.unscale_(optimizer)


def steps(model, optimizer, scaler, schedule, max_norm):
    scaler.step(optimizer)
    scaler.update()


def only_zero(model, optimizer, scaler, schedule, max_norm):
    optimizer.zero_grad()
    schedule.step()
    return True


def ends_badly(schedule_step, own_step=False, zero=True):
    """An end with another place for the schedule, or without zero_grad."""

    def end(model, optimizer, scaler, schedule, max_norm):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scale = scaler.get_scale()
        if schedule_step == "before":
            schedule.step()
        if own_step:
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
        stepped = scaler.get_scale() >= scale
        if zero is True or (zero == "stepped" and stepped):
            optimizer.zero_grad()
        fine = {"always": True, "stepped": stepped, "equal": scaler.get_scale() == scale}
        if fine.get(schedule_step):
            schedule.step()
        return stepped

    return end


def returns(value):
    def end(*arguments):
        stepped = finish(*arguments)
        return not stepped if value == "skipped" else value

    return end


add("always_syncs", "all-reduces the gradients 3 times", syncs=lambda index, count: True)
add("never_syncs", "no gradient was all-reduced", syncs=lambda index, count: False)
add("first_syncs", "though gradients were all-reduced once", syncs=lambda index, count: index == 0)
add("in_bf16", "outputs are bfloat16, not float16", dtype=torch.bfloat16)
add("steps_inside", "takes 3 steps: one a window", after=steps, end=only_zero)
add("unscales_inside", "unscale_ belongs once into a step", after=unscales)
add("clips_inside", "it clips after each micro-batch", after=clips_scaled)
add("clips_first", "clipping sees gradients that still carry the loss scale", end=clips_first)
add("to_one", "not clipped to max_norm", end=to_one)
add("not_scaled", "the loss is not scaled before backward", scale=1.0)
add("summed", "it is not divided by the samples of the window", divisor=lambda window: 1)
add("not_divided", "nothing divides by their number", divisor=lambda window: len)
add("own_count", "each rank divides by its own number of samples",
    divisor=lambda window: sum(len(y) for _, y in window))  # fmt: skip
add("mean_of_means", "it is the mean of the micro-batches' means",
    divisor=lambda window: lambda y: len(y) * len(window))  # fmt: skip
add("all_ranks", "too small by the world size",
    divisor=lambda window: divisor_of(window) * dist.get_world_size())  # fmt: skip
add("schedule_inside", "the schedule counts micro-batches", end=ends_badly("never"),
    after=lambda model, optimizer, scaler, schedule, max_norm: schedule.step())  # fmt: skip
add("schedule_always", "also when the step is skipped", end=ends_badly("always"))
add("schedule_never", "the schedule never moves", end=ends_badly("never"))
add("schedule_if_equal", "after which the scale *grew*", end=ends_badly("equal"))
add("schedule_first", "the schedule moves before the step", end=ends_badly("before"))
add("steps_by_itself", "steps although a gradient is inf", end=ends_badly("stepped", own_step=True))
add("never_clears", "those of the window before: zero_grad is missing",
    end=ends_badly("stepped", zero=False))  # fmt: skip
add("clears_if_stepped", "zero_grad is missing after a *skipped* window",
    end=ends_badly("stepped", zero="stepped"))  # fmt: skip
add("returns_none", "it should return True or False", end=returns(None))
add("returns_true", "in which the step was skipped", end=returns(True))
add("returns_skipped", "in which the step was taken", end=returns("skipped"))


@wrong("outputs are float32, not float16")
def no_autocast(model, optimizer, scaler, schedule, window, max_norm):
    divisor = divisor_of(window)
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            scaler.scale(F.cross_entropy(model(x), y, reduction="sum") / divisor).backward()
    return finish(model, optimizer, scaler, schedule, max_norm)


@wrong("backward runs under autocast")
def all_under_autocast(model, optimizer, scaler, schedule, window, max_norm):
    with torch.amp.autocast("cpu", dtype=torch.float16):
        return in_order(model, optimizer, scaler, schedule, window, max_norm)


@wrong("are gradients cleared inside the window")
def clears_inside(model, optimizer, scaler, schedule, window, max_norm):
    divisor = divisor_of(window)
    for index, (x, y) in enumerate(window):
        optimizer.zero_grad()
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            scaler.scale(loss_of(model, x, y, divisor)).backward()
    return finish(model, optimizer, scaler, schedule, max_norm)


@wrong("the last micro-batch of each window is left out")
def drops_the_last(model, optimizer, scaler, schedule, window, max_norm):
    divisor = divisor_of(window)
    for index, (x, y) in enumerate(window[:-1]):
        last = index == len(window) - 2
        with contextlib.nullcontext() if last else model.no_sync():
            scaler.scale(loss_of(model, x, y, divisor)).backward()
    return finish(model, optimizer, scaler, schedule, max_norm)


@wrong("it leaves out the micro-batch that is not finite")
def leaves_out_bad(model, optimizer, scaler, schedule, window, max_norm):
    divisor = divisor_of(window)
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, x, y, divisor)
            if loss.isfinite():
                scaler.scale(loss).backward()
    return finish(model, optimizer, scaler, schedule, max_norm)


@wrong("a rank must not judge by its own loss")
def judges_by_its_own_loss(model, optimizer, scaler, schedule, window, max_norm):
    divisor, fine = divisor_of(window), True
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, x, y, divisor)
            scaler.scale(loss).backward()
        fine = fine and bool(loss.isfinite())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if fine:
        schedule.step()
    return fine


@wrong("the ranks' loss scales differ")
def lowers_its_own_scale(model, optimizer, scaler, schedule, window, max_norm):
    divisor, fine = divisor_of(window), True
    for index, (x, y) in enumerate(window):
        last = index == len(window) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model, x, y, divisor)
            scaler.scale(loss).backward()
        fine = fine and bool(loss.isfinite())
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update(None if fine else scaler.get_scale() / 4)
    optimizer.zero_grad()
    if fine:
        schedule.step()
    return fine


@wrong("Likely: a rank left out a collective")
def leaves_early(model, optimizer, scaler, schedule, window, max_norm):
    if not all(x.isfinite().all() for x, _ in window):
        scaler.update(scaler.get_scale() / 2)
        return False
    return in_order(model, optimizer, scaler, schedule, window, max_norm)


in_order = step()
in_order.__name__ = "in_order"
right(in_order)


@right
def with_the_package(model, optimizer, scaler, schedule, window, max_norm):
    from ddp_course.accumulation import Window, accumulate
    from ddp_course.amp import MixedPrecision

    amp = MixedPrecision("fp16", "cpu", max_norm)
    amp.scaler = scaler
    window = Window(window)
    divisor = window.divisor()
    for x, y in accumulate(model, window):
        with amp.autocast():
            loss = F.cross_entropy(model(x), y, reduction="sum") / divisor
        amp.backward(loss)
    result = amp.step(optimizer)
    if not result.skipped:
        schedule.step()
    return not result.skipped


@right
def clears_first_and_divides_late(model, optimizer, scaler, schedule, window, max_norm):
    """Sums gradients, and divides them once, by counts that were gathered."""
    optimizer.zero_grad(set_to_none=False)
    *all_but_last, last = window
    with model.no_sync():
        for x, y in all_but_last:
            scaler.scale(loss_of(model, x, y, 1)).backward()
    scaler.scale(loss_of(model, *last, 1)).backward()
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(len(y) for _, y in window))
    scaler.unscale_(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad *= len(counts) / sum(counts)
    norm = nn.utils.clip_grad_norm_(trained, max_norm)
    scaler.step(optimizer)
    scaler.update()
    if norm.isfinite():
        schedule.step()
    return norm.isfinite()


@right
def with_one_all_reduce_by_hand(model, optimizer, scaler, schedule, window, max_norm):
    """Never lets DDP synchronise: one all-reduce of all gradients, and the count with them."""
    with model.no_sync():
        for x, y in window:
            with torch.autocast("cpu", torch.float16):
                loss = nn.CrossEntropyLoss(reduction="sum")(model(x).float(), y)
            (loss * scaler.get_scale()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    samples = torch.tensor([float(sum(len(y) for _, y in window))])
    flat = torch.cat([p.grad.flatten() for p in trained] + [samples])
    dist.all_reduce(flat)
    parts = (flat[:-1] / flat[-1]).split([p.numel() for p in trained])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter).clone()
    taken = []
    hook = optimizer.register_step_post_hook(lambda *_: taken.append(True))
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    hook.remove()
    optimizer.zero_grad()
    if taken:
        schedule.step()
    return bool(taken)
