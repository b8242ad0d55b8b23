# %% [markdown]
# # Four micro-batches and a slow network
#
# *Run ▸ Run All Cells*.
#
# ### Four micro-batches make one optimizer step. How many times must the gradients cross the network? How many times does DDP send them?

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
import time
from contextlib import nullcontext
from itertools import groupby
from statistics import median

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import controls, dials, models, report
from ddp_course.network import SlowLink, mbit
from ddp_course.plots.sketch import chart


class Counting(SlowLink):
    """A slow link that counts the all-reduces it carries."""

    calls = 0

    def __call__(self, state, bucket):
        self.calls += 1
        return super().__call__(state, bucket)


def train_slowly():
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=512), bucket_cap_mb=25)  # one bucket
    link = Counting(mbit(1000), latency=1e-4)
    model.register_comm_hook(None, link)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    for step in range(10**9):
        knobs = dials(micro_batches=4, no_sync=0, link_in_Mbit_per_s=1000)
        link.bandwidth = mbit(knobs.link_in_Mbit_per_s)
        start, before = time.perf_counter(), link.calls
        many = int(knobs.micro_batches)
        for index in range(many):
            quiet = knobs.no_sync and index < many - 1
            with model.no_sync() if quiet else nullcontext():
                (F.cross_entropy(model(x), y) / many).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - start
        dialled = [many, bool(knobs.no_sync), round(knobs.link_in_Mbit_per_s)]
        speed, calls = 64 * many / seconds, link.calls - before
        report(step=step, speed=speed, calls=calls, dialled=str(dialled))


def draw(records):
    mine = [record for record in records if record["rank"] == 0]
    if not mine:
        return ""
    # Only what was measured since a dial was turned, beside the speed from before.
    parts = [list(part) for _, part in groupby(mine, key=lambda r: r["dialled"])]
    medians = [median(record["speed"] for record in part) for part in parts[-2:]]
    title = f"{medians[-1]:,.0f} samples/s"
    if len(medians) == 2:
        title += f", before {medians[0]:,.0f}: × {medians[1] / medians[0]:.2f}"
    size = {"size": 24, "width": 900, "height": 190, "from_zero": True}
    now = parts[-1][-200:]
    speed, calls = ([record[name] for record in now] for name in ("speed", "calls"))
    return chart(title, [(speed, "black", 4)], unit="1/s", **size) + chart(
        f"all-reduces for one optimizer step: {calls[-1]}",
        [(calls, "#D55E00", 4)],
        unit="calls",
        **size,
    )


panel = controls.Panel(
    train_slowly,
    dials={
        "link_in_Mbit_per_s": (100.0, 1000.0, 10000.0),
        "micro_batches": (1, 4, 8),
        "no_sync": False,
    },
    draw=draw,
    title="Two ranks accumulate gradients over a link you can dial",
)
panel

# %% [markdown]
# <details><summary>For the instructor: what will happen</summary>
#
# Without `no_sync` DDP all-reduces after *every* backward: four times for one optimizer step, and on a slow link each of
# them is waited for. Tick *no sync* (`model.no_sync()` in code): one all-reduce a step, and the samples per second jump; the slower the link, the more. At 10,000 Mbit/s
# there is little to win. With one micro-batch there is nothing to win at all.
#
# The gradients are really all-reduced; only when they arrive is modelled (`ddp_course.network.SlowLink`). Lesson 07 measures it, lesson 10 takes it further.
#
# Press **Stop** before you go on to the next demonstration: closing the tab does not stop the ranks.
#
# </details>
