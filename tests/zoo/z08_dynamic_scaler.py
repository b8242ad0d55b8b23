"""Wrong and right answers to 08_dynamic_scaler: what each is told."""

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def scaler(**change):
    """A scaler with one thing changed."""
    find = change.get("find", lambda g: not g.isfinite().all())
    everywhere = change.get("everywhere", True)

    def scaler_step(optimizer, state):
        groups = optimizer.param_groups
        gradients = [
            p.grad
            for group in groups[: change.get("groups", len(groups))]
            for p in group["params"]
            if p.grad is not None
        ]
        for g in gradients:
            change.get("unscale", lambda g, scale: g.div_(scale))(g, state["scale"])
        bad = torch.tensor(float(any(find(g) for g in gradients)))
        if change.get("average"):
            for g in gradients:
                dist.all_reduce(g, op=dist.ReduceOp.AVG)
        if everywhere:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if bad and not change.get("anyway"):
            state["scale"] *= change.get("backoff", 0.5)
            if not change.get("keep_count"):
                state["good_steps"] = 0
            return False
        optimizer.step()
        state["good_steps"] += 1
        if state["good_steps"] >= state["growth_interval"] + change.get("late", 0):
            state["scale"] *= change.get("growth", 2)
            if not change.get("grows_on"):
                state["good_steps"] = 0
        return change.get("returns", True)

    return scaler_step


def add(name, message, **change):
    fn = scaler(**change)
    fn.__name__ = name
    WRONG[fn] = message


add("not_unscaled", "were not divided by the scale", unscale=lambda g, scale: g)
add("steps_anyway", "it takes the step although", anyway=True)
add("nan_only", "it looks for nan only", find=lambda g: g.isnan().any())
add("inf_only", "it looks for inf only", find=lambda g: g.isinf().any())
add("keeps_the_scale", "does not halve the scale", backoff=1)
add("keeps_the_count", "the count of good steps goes on", keep_count=True)
add("grows_on", "the count does not begin at 0", grows_on=True)
add("late", "one step too late", late=1)
add("own_rank_only", "each rank decides for itself", everywhere=False)
add("first_group_only", "only optimizer.param_groups[0] was handled", groups=1)
add("averages_too", "the gradients were averaged over the ranks", average=True)
add("multiplies", "the weights are wrong", unscale=lambda g, scale: g.mul_(scale))
add("quarters", "the scale is 1", backoff=0.25)
add("never_grows", "the scale is", growth=1)
add("returns_none", "it returns nothing", returns=None)


@wrong("has no attribute")
def forgets_none(optimizer, state):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.div_(state["scale"])
    optimizer.step()
    return True


right(scaler())


@right
def with_norms(optimizer, state):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack([g.double().norm() for g in gradients]).sum()
    ok = total.isfinite().int()
    dist.all_reduce(ok, op=dist.ReduceOp.MIN)
    if ok.item() == 0:
        state.update(scale=state["scale"] / 2, good_steps=0)
        return False
    with torch.no_grad():
        for g in gradients:
            g *= 1 / state["scale"]
    optimizer.step()
    state["good_steps"] = (state["good_steps"] + 1) % state["growth_interval"]
    if state["good_steps"] == 0:
        state["scale"] = state["scale"] * 2
    return True


@right
def by_gathering(optimizer, state):
    gradients = []
    for group in optimizer.param_groups:
        gradients += [p.grad for p in group["params"] if p.grad is not None]
    for gradient in gradients:
        gradient /= state["scale"]
    mine = all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if all(everybody):
        optimizer.step()
        state["good_steps"] += 1
        if state["good_steps"] == state["growth_interval"]:
            state["scale"] *= 2.0
            state["good_steps"] = 0
    else:
        state["scale"] /= 2.0
        state["good_steps"] = 0
    return all(everybody)
