# %% [markdown]
# # Two ranks, each on its own
#
# *Run ▸ Run All Cells*.
#
# ### Both ranks begin with the same weights. Each sees half of the data. Where will their weights be after a hundred steps?

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ddp_course import controls, data, dials, live, models, report
from ddp_course.plots.sketch import chart


def flat(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def train_apart():
    """Each rank trains on its own half of the digits; the notebook says what they share."""
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = data.shard(data.digits()[0], micro_batch=32)
    for step in range(10**9):
        if step % len(loader) == 0:
            batches = iter(loader)
        x, y = next(batches)
        knobs = dials(average_gradients=0, copy_rank_0=0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            if knobs.average_gradients:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            if knobs.copy_rank_0:
                dist.broadcast(parameter.data, src=0)
        optimizer.step()
        optimizer.zero_grad()
        mine = flat(model.parameters())
        of_rank_0 = mine.clone()
        dist.broadcast(of_rank_0, src=0)
        report(step=step, distance=(mine - of_rank_0).norm(), loss=loss)


def draw(records):
    by_rank = {rank: [r for r in records if r["rank"] == rank] for rank in (0, 1)}
    now = by_rank[1][-1]["distance"] if by_rank[1] else 0.0
    return chart(
        f"distance between the ranks' weights: {now:.3f}   (step {records[-1]['step']})",
        live.of_ranks(by_rank, "distance", thickness=4),
        from_zero=True,
        unit="L2",
        size=24,
        width=900,
        height=360,
    )


panel = controls.Panel(
    train_apart,
    dials={"average_gradients": False, "copy_rank_0": False},
    draw=draw,
    title="The same first weights, different data",
)
panel

# %% [markdown]
# <details><summary>For the instructor: what will happen</summary>
#
# The distance climbs from the first step: two models. Tick *average gradients*: the distance stops
# growing, but what has drifted apart **stays apart**, since the same step is added to different weights. Tick *copy rank 0* and
# untick it again: the distance falls to 0 and, with the gradients averaged, stays there. Untick *average gradients*, and it climbs again. (*Copy rank 0* alone never comes to 0: one step of difference is always there.)
#
# **So DDP does two things:** it copies rank 0's weights once, at the start, and averages the gradients in every step. Lesson 04 builds it.
#
# Press **Stop** before you go on to the next demonstration: closing the tab does not stop the ranks.
#
# </details>
