# %% [markdown]
# # Exercise 04 · A DDP of your own, in buckets
#
# PyTorch's `DistributedDataParallel` sends gradients while backward is still running, and in few messages. Now you write the part
# that does it. **Write** `bucketed_ddp(model, bucket_bytes)`. It prepares a model and returns a function, `finish`. The loop stays
# as you know it, with one line more:
#
# ```python
# finish = bucketed_ddp(model, bucket_bytes=25_000_000)
# for x, y in loader:
#     F.cross_entropy(model(x), y).backward()
#     finish()
#     optimizer.step()
#     optimizer.zero_grad()
# ```
#
# | | |
# | --- | --- |
# | who calls it | every rank, with a model of the same layers; weights and buffers may differ |
# | at once | every parameter, also a frozen one, and every buffer becomes rank 0's |
# | buckets | the trained parameters in *reverse* order of `model.parameters()`; the next one goes into the same bucket if it fits into `bucket_bytes` and has the same type, else it begins a new one (so one that is bigger has a bucket of its own) |
# | in backward | a bucket is sent, as one `all_reduce` with `async_op=True`, as soon as all of its gradients are there; nobody waits in a hook |
# | in which order | bucket 0, 1, 2, … on every rank, in whatever order the gradients come: a full bucket waits for those before it |
# | `finish()` | waits; afterwards each `.grad` is the mean over the ranks, and the next backward can begin |
# | you may assume | every backward reaches every parameter that is not frozen |
#
# About 40 minutes. Lesson [04](../notebooks/04_ddp_from_scratch.ipynb), sections 4 and 5, has all you need. Write it without
# `ddp_course.ddp`: that would be looking it up.

# %%
import torch
import torch.distributed as dist


def bucketed_ddp(model, bucket_bytes):
    """Average the model's gradients in buckets, during backward; return finish()."""
    # BEGIN SOLUTION broadcast, buckets, hooks that send; return a function that waits
    for tensor in [*model.parameters(), *model.buffers()]:
        # Detached, or autograd would object to a write into a weight.
        dist.broadcast(tensor.detach(), src=0)

    buckets, room = [], 0
    for p in reversed([p for p in model.parameters() if p.requires_grad]):
        # bytes, not elements; and a message is of one type
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes

    ready, under_way = set(), []

    def collect(parameter):
        ready.add(parameter)
        for bucket in buckets[len(under_way) :]:  # one gradient can set off several
            if not ready.issuperset(bucket):
                # Those behind it wait, full or not: so all ranks send bucket 0, 1, 2, …,
                # in whatever order their gradients come.
                break
            flat = torch.cat([p.grad.flatten() for p in bucket])
            work = dist.all_reduce(flat, async_op=True)  # returns at once
            under_way.append((work, flat))  # flat must live until it has arrived

    for bucket in buckets:  # so no frozen parameter gets a hook
        for p in bucket:
            p.register_post_accumulate_grad_hook(collect)

    def finish():
        for bucket, (work, flat) in zip(buckets, under_way, strict=True):
            work.wait()  # only now is flat the sum
            parts = (flat / dist.get_world_size()).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, parts, strict=True):
                p.grad.copy_(mean.view_as(p))
        ready.clear()  # or the next backward would find all buckets sent
        under_way.clear()

    return finish
    # END SOLUTION


# %% [markdown]
# ## Try it
#
# Some steps of a real network on two ranks. To see your messages, `watched` notes when each all-reduce starts and when it has arrived. Do
# they begin in the middle of backward? (A hook that waits would look well hidden in this picture. The check finds it.)

# %% tags=["nbval-ignore-output"]
import torch.nn.functional as F

from ddp_course import launch, models, plots, trace

all_reduce = dist.all_reduce


def watched(*arguments, **options):
    """dist.all_reduce, as a span for the picture."""
    span = trace.span("all-reduce")
    span.__enter__()
    work = all_reduce(*arguments, **options)
    if work is None:  # it has waited already
        span.__exit__(None, None, None)
    else:
        work.get_future().then(lambda done: span.__exit__(None, None, None))
    return work


# %%
def traced_steps(prepare, steps=6):
    dist.all_reduce = watched
    torch.manual_seed(dist.get_rank())
    model = models.MLP(width=768, depth=5)
    finish = prepare(model, bucket_bytes=2_400_000)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    recorded = []
    for _ in range(steps):
        dist.barrier()  # begin together
        trace.clear()
        with trace.span("forward"):
            loss = F.cross_entropy(model(x), y)
        with trace.span("backward"):
            loss.backward()
        with trace.span("waiting"):
            finish()
        model.zero_grad()
        recorded.append(trace.spans())
    return recorded[2:]  # the first ones warm up


# %% tags=["nbval-ignore-output"]
def quickest(run):
    """The spans of both ranks, of the step that took least time."""
    steps = [first + second for first, second in zip(*run.values, strict=True)]
    return min(
        steps, key=lambda spans: max(span["end"] for span in spans) - spans[0]["start"]
    )


print("six steps on two ranks …")
mine = quickest(launch(traced_steps, bucketed_ddp))
plots.timeline(mine)

# %% [markdown]
# ## Check it
#
# A few seconds, new numbers each time. In the first check one rank is late on purpose: the other must be able to end its backward without it, and
# must not get past `finish()`.

# %% tags=["nbval-ignore-output"]
from ddp_course.grading import check

report = check("04_bucketed_ddp", bucketed_ddp)

# %% tags=["solution-only"]
assert report

# %% [markdown]
# <details><summary>Hint 1</summary>
#
# Three parts: a broadcast loop; a loop that fills a list of buckets (lists of parameters); a hook. `finish` and the hook share two things: which
# gradients are there (a `set` of parameters works), and what is under way (a list of `(work, flat)`).
# </details>
#
# <details><summary>Hint 2</summary>
#
# The hook gets the parameter. The next bucket to go is `buckets[len(under_way)]`. While there is such a bucket and all of its parameters are
# there: `torch.cat` their flattened gradients, start the `all_reduce`, remember both. Why *while* there is one, and not *if*?
# </details>
#
# <details><summary>Hint 3</summary>
#
# In `finish`, for each bucket: `work.wait()`, divide, `flat.split([p.numel() for p in bucket])`, and `p.grad.copy_(part.view_as(p))`. In the end clear both
# the set and the list, or the second backward goes wrong. Frozen parameters are in the broadcast only.
# </details>

# %% [markdown] tags=["solution-only"]
# ## The same as PyTorch's
#
# Two ranks, unequal weights at the start, one backward: your function and PyTorch's DDP on a copy.


# %% tags=["solution-only"]
def both():
    torch.manual_seed(dist.get_rank())
    ours, theirs = (models.MLP(width=32).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    finish = bucketed_ddp(ours, bucket_bytes=4000)
    parallel = torch.nn.parallel.DistributedDataParallel(theirs, bucket_cap_mb=0.004)
    x, y = torch.randn(8, 64).double(), torch.randint(10, (8,))
    F.cross_entropy(ours(x), y).backward()
    finish()
    F.cross_entropy(parallel(x), y).backward()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


furthest = max(launch(both).values)
assert furthest < 1e-12  # float64 rounding
print("equal to rounding")

# %% [markdown] tags=["solution-only"]
# ## A common wrong turn
#
# Average each gradient in its hook, without `async_op=True`: no buckets, no `finish`, and all numbers are right. But every message is one
# parameter's, and backward stands still during each: the sending has moved into backward, and runs beside nothing.


# %% tags=["solution-only", "nbval-ignore-output"]
def waits_in_the_hook(model, bucket_bytes):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)

    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)
    return lambda: None


assert not check("04_bucketed_ddp", waits_in_the_hook, seed=1)
