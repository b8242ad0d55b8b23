# %% [markdown]
# # A sum that goes round in a ring
#
# *Run ▸ Run All Cells*.
#
# ### Four ranks hold 1, 10, 100 and 1,000 in each of their four chunks. All need 1,111 everywhere. How many messages must each send?

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist

from ddp_course import collectives, controls, plots, report


def sum_in_a_ring():
    """Each rank holds its own number in every chunk; the sum goes round."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x = torch.full((world_size,), 10.0**rank)
    report(step=0, chunks=x)
    for step in collectives.ring_steps(x):
        report(step=step.number, chunks=x, sent=step.sent, received=step.received)


def draw(records, step):
    picture = plots.ring(records, step)
    picture.set_dpi(150)  # for the back of the room
    return picture


panel = controls.Stepper(
    {f"{n} ranks": (sum_in_a_ring, {"nproc": n}, range(2 * n - 1)) for n in (4, 3, 2)},
    draw=draw,
    title="Each rank talks to its right neighbour only",
)
panel

# %% [markdown]
# <details><summary>For the instructor: what will happen</summary>
#
# Ask also: how much of its tensor does a rank send in all? Then press **Start**, and go on with **Next** or the slider. In the first three steps each chunk travels round and is added to: then every rank has *one* finished chunk. In
# the next three steps the finished chunks travel round. 2 × (4 − 1) = 6 steps, a quarter of the tensor each: 1.5 tensors sent. In
# a larger ring it is 2 (N − 1) / N tensors: more, but never 2.
#
# The numbers were sent by real ranks; the slider shows what each of them held after each step. Lesson 02 builds it, and the exercise asks for it.
#
# </details>
