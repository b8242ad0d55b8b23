# %% [markdown]
# # Exercise 10 · What a number about speed must contain
#
# "Two GPUs are 1.9 times as fast." On what, counted how, and whose clock was it? **Write** `scaling_report(job, alone, kind, steps, warmup)`: it runs a training
# for some steps and says how fast it is, in a form that can be compared.
#
# | | |
# | --- | --- |
# | who calls it | every rank, with the same `alone`, `kind`, `steps` and `warmup` |
# | `job.step()` | runs one step on this rank, or only *asks* for it, as on a GPU |
# | `job.synchronize()` | returns when all that was asked for is done |
# | `job.clock()` | this rank's time in seconds; the clocks of two ranks do not begin at the same moment |
# | `job.samples` | how many samples a step of *this* rank takes; ranks may differ |
# | `alone` | seconds that one process needed for a step, measured before |
# | `kind` | `"strong"`: the ranks share the batch which that process had; `"weak"`: each rank has a batch as large as that process had |
# | it runs | `warmup` steps that do not count, then `steps` that do; before each of these the ranks wait for one another, and no collective is timed with a step |
# | a step's time | that of the rank that took longest |
# | returns | on every rank the same dict: |
# | · `"ranks"` | how many ranks |
# | · `"samples"` | of a step, all ranks together |
# | · `"seconds"` | the median of the timed steps (`statistics.median`) |
# | · `"worst"` | the longest of the timed steps |
# | · `"samples_per_second"` | with the median |
# | · `"efficiency"` | the share of the ideal that was reached, 1 at best, by `kind` |
#
# About 20 minutes. Lesson [10](../notebooks/10_performance.ipynb), sections 1 and 3, has all you need; the samples are one more all-reduce.

# %%
import statistics

import torch
import torch.distributed as dist


def scaling_report(job, alone, kind, steps, warmup):
    """Run the job; return how fast it is on all ranks together."""
    # BEGIN SOLUTION time each step of the slowest rank, and report median, samples and efficiency
    times = []
    for number in range(warmup + steps):
        dist.barrier()  # begin together: waiting for a late rank is not this step's time
        job.synchronize()  # what was asked for before is not this step's, either
        start = job.clock()
        job.step()
        job.synchronize()  # asked for is not done
        if number >= warmup:
            times.append(job.clock() - start)  # a difference: clocks begin anywhere
    # A step has ended when it has ended everywhere. One all-reduce, after all of them.
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    slowest = slowest.tolist()
    samples = torch.tensor(job.samples)
    dist.all_reduce(samples)  # each sample once, also where ranks have unequal numbers
    ranks, seconds = dist.get_world_size(), statistics.median(slowest)
    # One batch shared: 1 / ranks of the time would be ideal. A batch each: the same time.
    ideal = alone / ranks if kind == "strong" else alone
    return {
        "ranks": ranks,
        "samples": samples.item(),
        "seconds": seconds,
        "worst": max(slowest),
        "samples_per_second": samples.item() / seconds,
        "efficiency": ideal / seconds,
    }
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# A real training on one rank and on two, a batch each. Its gradients cross a link of 1 Gbit/s. The picture shows what your report says.

# %% tags=["nbval-ignore-output"]
import math
import time

import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, models, plots, scaling
from ddp_course.network import SlowLink, mbit


class Training:
    """What a job is: four things."""

    samples, clock = 128, staticmethod(time.perf_counter)
    synchronize = staticmethod(scaling.wait_for_device)

    def __init__(self):
        torch.set_num_threads(1)
        self.model = DistributedDataParallel(models.MLP(width=512))
        self.model.register_comm_hook(None, SlowLink(mbit(1000)))
        self.x, self.y = torch.randn(128, 64), torch.randint(10, (128,))

    def step(self):
        F.cross_entropy(self.model(self.x), self.y).backward()


def measure(alone):
    return scaling_report(Training(), alone, "weak", steps=7, warmup=3)


one = launch(measure, alone=math.nan, nproc=1).values[0]
two = launch(measure, alone=one["seconds"], nproc=2).values[0]
for report in (one, two):
    print({key: round(value, 4) for key, value in report.items()})
plots.speedup(
    {"your report": {1: 1.0, 2: 2 * two["efficiency"]}},
    title="What does your report say of a second rank on a slow link?",
)

# %% [markdown]
# (The first has no efficiency: it was given no time to compare with.)
#
# ## Check it
#
# A few seconds, new numbers each time, on up to three ranks. A check that fails says what it saw, and what that looks like.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report_card = check("10_scaling_report", scaling_report)

# %% tags=["solution-only"]
assert report_card

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Collect the seconds of each step in a list, on each rank for itself: barrier, synchronize, clock, step, synchronize, clock. The ranks exchange them only after the
# last step.
# </details>
#
# <details><summary>Hint 2</summary>
#
# A tensor of all times, `dist.all_reduce(…, op=dist.ReduceOp.MAX)`: element k is then the time of step k on the rank that took longest. Use float64. Samples are
# added up by an all-reduce as well, with the default operation.
# </details>
#
# <details><summary>Hint 3</summary>
#
# Strong: `alone / (ranks * seconds)`. Weak: `alone / seconds`. Both are 1 when nothing is lost.
# </details>

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# Each rank takes the median of its own times, and the largest median is reported. If it is always the same rank that is slow, this is right. But ranks take turns
# in being slow, and *each* slow one makes all others wait:


# %% tags=["solution-only", "nbval-ignore-output"]
def largest_median(job, alone, kind, steps, warmup):
    times = []
    for _ in range(warmup + steps):
        dist.barrier()
        job.synchronize()
        start = job.clock()
        job.step()
        job.synchronize()
        times.append(job.clock() - start)
    seconds, worst, samples = (
        torch.tensor(value, dtype=torch.float64)
        for value in (statistics.median(times[warmup:]), max(times[warmup:]), job.samples)
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    dist.all_reduce(samples)
    ranks = dist.get_world_size()
    return {
        "ranks": ranks,
        "samples": samples.item(),
        "seconds": seconds.item(),
        "worst": worst.item(),
        "samples_per_second": (samples / seconds).item(),
        "efficiency": alone / (ranks if kind == "strong" else 1) / seconds.item(),
    }


assert not check("10_scaling_report", largest_median, seed=1)
