"""Wrong and right answers to 08_amp_step: what each is told."""

import torch
import torch.nn.functional as F
from torch import nn

from . import answers

WRONG, RIGHT, wrong, right = answers()


def forward(model, x, y, dtype=torch.float16, reduction="mean"):
    with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        return F.cross_entropy(model(x), y, reduction=reduction)


def clip(model, max_norm):
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


def step(optimizer, scaler):
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale() >= before


def finish(model, optimizer, scaler, max_norm):
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    return norm, step(optimizer, scaler)


# ---- types


@wrong("outputs are float32, not float16")
def no_autocast(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y, torch.float32)
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("outputs are bfloat16, not float16")
def in_bf16(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y, torch.bfloat16)
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("backward runs under autocast")
def all_under_autocast(model, optimizer, scaler, x, y, max_norm):
    with torch.amp.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("the loss is computed in fp16, outside of autocast")
def loss_outside(model, optimizer, scaler, x, y, max_norm):
    with torch.amp.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits, y)
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("The weights were cast to fp16")
def casts_the_model(model, optimizer, scaler, x, y, max_norm):
    model.half()
    loss = F.cross_entropy(model(x.half()).float(), y)
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("there are weights in float16")
def casts_the_model_in_the_end(model, optimizer, scaler, x, y, max_norm):
    model.float()
    told = in_order(model, optimizer, scaler, x, y, max_norm)
    model.half()
    return told


# ---- scale, unscale, clip, step


@wrong("The loss was not scaled before backward")
def not_scaled(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    loss.backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("multiplied by a fixed number, 65536")
def fixed_scale(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    (loss * 65536).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("divided by the loss scale twice")
def divides_too(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= scaler.get_scale()
    norm = clip(model, max_norm)
    return loss.item(), norm, step(optimizer, scaler)


@wrong("the gradients were not unscaled")
def never_unscaled(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    norm = clip(model, max_norm)
    if norm < float("inf"):
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm, norm < float("inf")


@wrong("clipping sees gradients that still carry the loss scale")
def clips_first(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    norm = clip(model, max_norm) / scaler.get_scale()
    scaler.unscale_(optimizer)
    return loss.item(), norm, step(optimizer, scaler)


@wrong("unscale_ belongs once into a step")
def unscales_twice(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("The step comes after all that needs gradients")
def unscales_after_the_step(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    scaler.update()
    optimizer.zero_grad()
    return loss.item(), norm, True


@wrong("update() is missing")
def no_update(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    scaler.step(optimizer)
    optimizer.zero_grad()
    return loss.item(), norm, norm < float("inf")


@wrong("Nobody has looked for inf")
def clears_before_all(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    optimizer.zero_grad()
    return loss.item(), 0.0, step(optimizer, scaler)


@wrong("the weights never move: the gradients are cleared before the step")
def clears_before_the_step(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    optimizer.zero_grad()
    return loss.item(), norm, step(optimizer, scaler)


@wrong("zero_grad is missing")
def never_clears(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    before = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    scaler.step(optimizer)
    scaler.update()
    return loss.item(), norm, scaler.get_scale() >= before


@wrong("it takes the step although a gradient is inf or nan")
def steps_by_itself(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    before = scaler.get_scale()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()
    return loss.item(), norm, scaler.get_scale() >= before


@wrong("not clipped to max_norm")
def fixed_norm(model, optimizer, scaler, x, y, max_norm):
    return in_order(model, optimizer, scaler, x, y, 1.0)


@wrong("each parameter is clipped by its own norm")
def one_by_one(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, float("inf"))
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_(parameter, max_norm)
    return loss.item(), norm, step(optimizer, scaler)


@wrong("each number is cut to max_norm")
def by_value(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, float("inf"))
    nn.utils.clip_grad_value_(model.parameters(), max_norm)
    return loss.item(), norm, step(optimizer, scaler)


@wrong("the loss is the sum over the 8 samples")
def summed(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y, reduction="sum")
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


# ---- what it returns


@wrong("the scaled one")
def returns_the_scaled_loss(model, optimizer, scaler, x, y, max_norm):
    loss = scaler.scale(forward(model, x, y))
    loss.backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@wrong("still carries its graph")
def returns_the_graph(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    return loss, *finish(model, optimizer, scaler, max_norm)


@wrong("it was taken before unscale_, and carries the loss scale")
def returns_the_scaled_norm(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return loss.item(), norm, finish(model, optimizer, scaler, max_norm)[1]


@wrong("it was taken after clipping")
def returns_the_clipped_norm(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip(model, max_norm)
    norm = clip(model, max_norm)
    return loss.item(), norm, step(optimizer, scaler)


@wrong("stepped is True although a step was skipped")
def says_always(model, optimizer, scaler, x, y, max_norm):
    return *in_order(model, optimizer, scaler, x, y, max_norm)[:2], True


@wrong("after a good step it stays, or grows")
def says_if_equal(model, optimizer, scaler, x, y, max_norm):
    before = scaler.get_scale()
    told = in_order(model, optimizer, scaler, x, y, max_norm)
    return *told[:2], scaler.get_scale() == before


@wrong("what scaler.step returns does not tell")
def says_what_the_step_returns(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = clip(model, max_norm)
    stepped = scaler.step(optimizer) is not None
    scaler.update()
    optimizer.zero_grad()
    return loss.item(), norm, stepped


@wrong("Compare the scale before and after update: after a good step it stays")
def says_if_it_grew(model, optimizer, scaler, x, y, max_norm):
    before = scaler.get_scale()
    told = in_order(model, optimizer, scaler, x, y, max_norm)
    return *told[:2], scaler.get_scale() > before


@wrong("the wrong way round")
def says_skipped(model, optimizer, scaler, x, y, max_norm):
    *told, stepped = in_order(model, optimizer, scaler, x, y, max_norm)
    return *told, not stepped


@wrong("it should return three values")
def returns_the_loss(model, optimizer, scaler, x, y, max_norm):
    return in_order(model, optimizer, scaler, x, y, max_norm)[0]


# ---- right


@right
def in_order(model, optimizer, scaler, x, y, max_norm):
    loss = forward(model, x, y)
    scaler.scale(loss).backward()
    return loss.item(), *finish(model, optimizer, scaler, max_norm)


@right
def by_hand(model, optimizer, scaler, x, y, max_norm):
    """Scales and clips with plain arithmetic, clears first, and asks the norm if it stepped."""
    optimizer.zero_grad(set_to_none=False)
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        logits = model(x)
    loss = nn.CrossEntropyLoss()(logits.float(), y)
    (scaler.get_scale() * loss).backward()
    scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    gradients = [gradient for gradient in gradients if gradient is not None]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    if norm > max_norm:
        for gradient in gradients:
            gradient *= max_norm / norm
    scaler.step(optimizer)
    scaler.update()
    return loss.detach(), norm, torch.isfinite(norm)


@right
def with_hooks(model, optimizer, scaler, x, y, max_norm):
    """Notices a step by its own hook."""
    taken = []
    hook = optimizer.register_step_post_hook(lambda *_: taken.append(1))
    forward = torch.amp.autocast("cpu", dtype=torch.float16)(lambda: F.cross_entropy(model(x), y))
    loss = forward()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    trained = [p for p in model.parameters() if p.requires_grad]
    norm = nn.utils.clip_grad_norm_(trained, max_norm, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    for parameter in model.parameters():
        parameter.grad = None
    hook.remove()
    return [float(loss.detach()), float(norm), bool(taken)]


@right
def with_the_package(model, optimizer, scaler, x, y, max_norm):
    from ddp_course.amp import MixedPrecision

    amp = MixedPrecision("fp16", "cpu", max_norm)
    amp.scaler = scaler
    with amp.autocast():
        loss = F.cross_entropy(model(x), y)
    amp.backward(loss)
    result = amp.step(optimizer)
    return loss.item(), result.grad_norm, not result.skipped
