# %% [markdown]
# # The hang zoo
#
# *Run ▸ Run All Cells*, and choose a program.
#
# ### What will each rank do? Where will it wait, and for whom? Will there be an error message?

# %% jupyter={"source_hidden": true} tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist

from ddp_course import controls


def barrier_on_rank_0():
    if dist.get_rank() == 0:
        dist.barrier()


def one_batch_fewer():
    for _ in range(3 - dist.get_rank()):
        dist.all_reduce(torch.ones(10))


def another_collective():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(10))
    else:
        dist.broadcast(torch.ones(10), src=0)
        dist.broadcast(torch.ones(10), src=1)


def one_rank_raises():
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("the file for rank 1 is missing")
    dist.all_reduce(torch.ones(10))


def two_that_both_receive_first():
    other = 1 - dist.get_rank()
    box = torch.ones(1)
    dist.recv(box, src=other)
    dist.send(box, dst=other)


panel = controls.Panel(
    {
        "a barrier inside if rank == 0": barrier_on_rank_0,
        "rank 1 has one batch fewer": one_batch_fewer,
        "the ranks call different collectives": another_collective,
        "rank 1 raises, rank 0 waits": one_rank_raises,
        "both wait for the other to send": two_that_both_receive_first,
    },
    title="Five programs that hang. Which line is to blame?",
    listing=True,
    timeout=60,
)
panel

# %% [markdown]
# <details><summary>For the instructor: what will happen</summary>
#
# Let the room read the program and answer before you press **Start**. Under plain `torchrun` or `mp.spawn` most of them would print nothing at all until PyTorch's own time-out, 30 minutes by default. Here
# the report comes after a few seconds: what each rank waits for and at which line, and which rank never came. Read it aloud from the top: *who*,
# *what for*, *where*. The numbers of lines are those of the program shown.
#
# **Then ask** for the repair, change the program in the hidden cell (click the bar at its left), run it, and press Start again. Lesson 11 has more of them.
#
# </details>
