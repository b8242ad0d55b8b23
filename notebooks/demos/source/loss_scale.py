# %% [markdown]
# # The loss scale under attack
#
# *Run ▸ Run All Cells*.
#
# ### Only rank 1 gets an inf. Does rank 0 take its step? Which loss scale does it use afterwards?

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import controls, data, dials, live, models, report
from ddp_course.plots.sketch import chart

GROWTH = 20  # steps without an overflow until the scale doubles; PyTorch's own: 2000
LEAST = 1.0  # at 0 a scale would stay for ever: 0 × 2 = 0


def train_in_fp16():
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", growth_interval=GROWTH)
    loader = data.shard(data.digits()[0], micro_batch=32)
    for step in range(10**9):
        if step % len(loader) == 0:
            batches = iter(loader)
        x, y = next(batches)
        knobs = dials(put_inf_into_rank_1=0)
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        if knobs.put_inf_into_rank_1 and dist.get_rank() == 1:
            loss = loss * float("inf")
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped = scaler.get_scale() < scale
        if scaler.get_scale() < LEAST:
            scaler.update(LEAST)
        report(step=step, loss_scale=scale, skipped=skipped, loss=loss.detach())


def draw(records):
    by_rank = {rank: [r for r in records if r["rank"] == rank] for rank in (0, 1)}
    both = min(map(len, by_rank.values()))  # to the last step that both have told
    if not both:
        return ""
    by_rank = {rank: mine[max(0, both - 300) : both] for rank, mine in by_rank.items()}
    size = {"size": 24, "width": 900, "height": 150}
    return "".join(
        f"<div><b>rank {rank}</b></div>" + live.loss_scale(mine, unit="log2", **size)
        for rank, mine in by_rank.items()
    ) + chart(
        "loss", live.of_ranks(by_rank, "loss", 2), unit="loss", from_zero=True, **size
    )


panel = controls.Panel(
    train_in_fp16,
    dials={"put_inf_into_rank_1": False},
    draw=draw,
    title="fp16 on two ranks, and an overflow on one of them",
)
panel

# %% [markdown]
# <details><summary>For the instructor: what will happen</summary>
#
# The scale doubles after every 20 good steps, until a real gradient overflows: a ✕, a skipped step, half the scale.
# Tick the box: **both** ranks skip, since the all-reduce carries the inf to rank 0's gradients, and both halve their scale, so
# they stay together. Keep it ticked, and the scale runs down to 1, where this program holds it, while nothing is learned. Untick it: it climbs
# again. (PyTorch's scaler has no such floor: it would go on to 0, and never return.)
#
# Lesson 08 builds such a scaler, lesson 09 shows what happens when ranks decide for themselves.
#
# Press **Stop** before you go on to the next demonstration: closing the tab does not stop the ranks.
#
# </details>
