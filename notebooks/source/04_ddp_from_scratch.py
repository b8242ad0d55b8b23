# %% [markdown]
# # 04 · DDP from scratch
#
# **What you will do.** Let two ranks drift apart, then keep them together by hand: broadcast the weights, average the gradients, hook
# into backward, fill buckets, and hide the communication. At the end your own DDP equals PyTorch's. Then you break PyTorch's in
# the four ways in which people break it.
#
# **What you will learn.** What `DistributedDataParallel` (DDP) does, when, and why it is quick; what it cannot see.
#
# **What you need.** Lessons 00 and 02. About 30 minutes.
#
# ---
# **The question.** Two ranks train the same network on different images. What keeps it the *same* network, and what does
# that cost?

# %% [markdown]
# ## 1. Without synchronisation
#
# To see ranks drift we need a number: how far are this rank's weights from rank 0's? The largest over all ranks counts.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import RankError, data, launch, models, plots, predict, report, show


def distance(model):
    """How far apart the ranks' weights are (L2): 0 only if they are equal bit for bit."""
    mine = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    apart = (mine - first).norm()
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    return apart.item()


# %% [markdown]
# Now the loop. Each rank builds its own network, with its own random numbers, and sees its own half of the digits. Two switches
# decide what the ranks do together: copy rank 0's weights at the start, and average the gradients in every step.


# %%
def train_together(copy_weights, average, epochs=2):
    torch.manual_seed(dist.get_rank())  # every rank begins with weights of its own
    model = models.MLP(width=64)
    if copy_weights:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    loader = data.shard(data.digits()[0], micro_batch=32)
    for step, (x, y) in enumerate(batch for _ in range(epochs) for batch in loader):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if average:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        report(step=step, distance=distance(model), loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# %%
guess = predict.choose(
    "Equal weights at the start, gradients never averaged. The ranks' distance …",
    ["stays 0", "grows, then settles", "grows and grows", "jumps about"],
)

# %% tags=["nbval-ignore-output"]
runs = {}
for name, average in (("never averaged", False), ("averaged", True)):
    print(name, "…")
    runs[name] = launch(train_together, copy_weights=True, average=average)
plots.drift(runs, title="Without averaging, ranks drift apart")


# %%
def distances(run):
    return [record["distance"] for record in run.records if record["rank"] == 0]


never, both = distances(runs["never averaged"]), distances(runs["averaged"])
assert never[0] == 0  # the same weights at the start
for step in (10, 20, 40):
    assert never[step] > never[step // 2] > 0  # and further apart all the time
assert set(both) == {0.0}
print("averaged: distance exactly 0 in all", len(both), "steps")


def losses(run, rank):
    return [record["loss"] for record in run.records if record["rank"] == rank]


for run in runs.values():
    assert all(losses(run, rank)[-1] < losses(run, rank)[0] / 2 for rank in (0, 1))
print("the losses of all ranks fell")
guess.compare("grows and grows")

# %% [markdown]
# **Never averaged**: the ranks climb away from each other, step by step. Each follows its own half of the data. **Averaged**: the
# distance is 0. Not small: 0. Equal weights, equal gradients and the same arithmetic give equal weights.
#
# Both began with rank 0's weights. Was that copy needed?

# %%
start = predict.choose(
    "Unequal weights at the start, gradients averaged in every step. The distance …",
    ["shrinks to 0", "stays as it is", "grows"],
)

# %% tags=["nbval-ignore-output"]
runs["unequal start"] = launch(train_together, copy_weights=False, average=True)
unequal = distances(runs["unequal start"])
print(f"distance at the first step {unequal[0]:.4f}, at the last {unequal[-1]:.4f}")
assert unequal[0] > 1 and abs(unequal[-1] - unequal[0]) < 1e-3  # float32 rounding
start.compare("stays as it is")

# %% [markdown]
# The same gradient moves both ranks by the same step, so what lies between them stays for ever. It takes both: equal weights once,
# equal gradients always.
#
# What does drifting apart *mean*? Ask both ranks' networks about the test images.

# %% tags=["nbval-ignore-output"]
images, labels = data.digits()[1].tensors


def answers(weights):
    model = models.MLP(width=64)
    model.load_state_dict(weights)
    return model(images).argmax(1)


disagree = {}
for name, run in runs.items():
    first, second = (answers(weights) for weights in run.values)
    disagree[name] = (first != second).sum().item()
    right = [(reply == labels).float().mean().item() for reply in (first, second)]
    print(f"{name}: they disagree on {disagree[name]} of {len(labels)} images; "
          f"right: {right[0]:.1%} and {right[1]:.1%}")  # fmt: skip

assert disagree["averaged"] == 0
assert min(disagree["never averaged"], disagree["unequal start"]) > 0

# %% [markdown]
# Without synchronisation you do not train one network on all of the data. You train two networks, each on half of it. No error was
# raised, both losses fell, and whichever rank saves the checkpoint throws the other's work away.

# %% [markdown]
# ## 2. What exactly is averaged?
#
# The loop *sums* the gradients over ranks and *divides* by the number of ranks. If every rank holds equally many samples, that is
# the gradient of the mean loss over all of them: the gradient that one process would compute on the full batch. Check it in
# float64, where rounding is small.


# %%
def averaged(counts, weighted):
    """How far the ranks' averaged gradient is from the full batch's (relative, L2)."""
    torch.manual_seed(0)
    model = models.MLP(width=64).double()
    x, y = (part[: sum(counts)] for part in data.digits()[0].tensors)
    full = torch.autograd.grad(F.cross_entropy(model(x.double()), y), model.parameters())

    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = x.split(counts)[rank], y.split(counts)[rank]
    loss = F.cross_entropy(model(x.double()), y)  # the mean over this rank's samples
    if weighted:
        loss = loss * len(y) * world_size / sum(counts)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    mine = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    full = torch.cat([gradient.flatten() for gradient in full])
    return ((mine - full).norm() / full.norm()).item()


# %%
off = predict.number(
    "Rank 0 holds 24 samples, rank 1 holds 8. How far is the averaged gradient from "
    "that of the 32?", start=0, unit="%", low=0, high=100,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
equal = launch(averaged, [16, 16], weighted=False).values[0]
unequal_counts = launch(averaged, [24, 8], weighted=False).values[0]
mended = launch(averaged, [24, 8], weighted=True).values[0]
print(f"16 and 16 samples: off by {equal:.0e}")
print(f"24 and 8: off by {unequal_counts:.0%}; with weights: {mended:.0e}")
assert max(equal, mended) < 1e-12  # float64 rounding
assert unequal_counts > 0.01
off.compare(
    100 * unequal_counts, title="Unequal counts: the mean of means is not the mean"
)

# %% [markdown]
# A mean of means gives each sample on rank 1 three times the weight of one on rank 0. DDP does just this, without a word: it does not
# know how many samples a rank had. The mended line weighs each rank's loss by its share of the samples. (Lesson 07 meets the same
# trap with tokens.)
#
# ## 3. The package's version
#
# `ddp_course.ddp` has these steps as functions. They are the loop's lines, plus two things a loop on its own network need not care
# about: frozen parameters take no part, and a parameter without a gradient counts as 0, because all ranks must call the same
# collectives.

# %%
from ddp_course import ddp

show.source(ddp.broadcast_model, ddp.average_gradients)

# %% [markdown]
# One message for each parameter is many messages. Each pays the latency of the network, so they had better travel as one:

# %%
show.source(ddp.average_gradients_flat)

# %% [markdown]
# ## 4. When is a gradient ready?
#
# All of this starts when backward has *ended*. Until then the network cable is idle; and while the cable works, nobody computes.
# Does backward produce all gradients at once?

# %%
when = predict.choose(
    "In which order do the gradients of three layers become ready in backward?",
    ["first layer first", "last layer first", "all at the end"],
)

# %%
model = models.MLP(width=8)
ready = []
for name, parameter in model.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))

F.cross_entropy(model(torch.randn(4, 64)), torch.arange(4)).backward()
layers = [int(name.split(".")[0]) for name in ready]  # 0, 2, 4: the linear layers
print("layers in order of arrival:", layers)
assert layers == sorted(layers, reverse=True)

# %% [markdown]
# The last layer's gradients are ready first, when most of backward is still to come. `register_post_accumulate_grad_hook` calls
# us at that moment. So: start to send at once, *without waiting* (`async_op=True`), and wait at the end.


# %%
class Overlapped(nn.Module):
    """Each gradient is sent as soon as it is ready; finish() waits for all of them."""

    def __init__(self, module):
        super().__init__()
        self.module, self.under_way = module, []
        ddp.broadcast_model(module)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.send)

    def send(self, parameter):
        work = dist.all_reduce(parameter.grad, async_op=True)  # returns at once
        self.under_way.append((work, parameter))

    def forward(self, x):
        return self.module(x)

    def finish(self):
        for work, parameter in self.under_way:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.under_way.clear()


# %% [markdown]
# That is the idea of DDP in twenty lines; section 7 will check that it is right. Backward runs through the same network on every rank, so
# all ranks call the same collectives in the same order. Two things are missing: `no_sync` (lesson 07), and something about size.
#
# ## 5. Buckets
#
# A network has hundreds of parameters, many of them tiny. One message each pays latency hundreds of times; one message for
# all overlaps with nothing. The way between are **buckets**: gradients are copied into a flat tensor of limited size (25 MB, if you do
# not say), and a bucket goes when all of its gradients are there. Here is the heart of the package's version. `self.hook` is the
# function that sends a bucket and returns a *future*, something to wait for.

# %%
show.source(ddp.BucketedDDP._collect, ddp.BucketedDDP._next, ddp.BucketedDDP.finish)

# %% [markdown]
# A `Bucket` is the flat tensor, and notes which of its gradients have come:

# %%
show.source(ddp.Bucket.__init__, ddp.Bucket.add, ddp.Bucket.give_back)

# %%
show.source(ddp.make_buckets, ddp.all_reduce_mean)

# %%
net = models.MLP(width=256, depth=3)
KB = 1024
for bucket in ddp.make_buckets(list(net.parameters())[::-1], cap=300 * KB):
    shapes = [tuple(parameter.shape) for parameter in bucket.parameters()]
    print(f"bucket {bucket.index()}: {bucket.buffer().nbytes // KB:3d} KB", shapes)
assert bucket.is_last() and bucket.parameters()[-1] is net[0].weight
assert dist._DEFAULT_FIRST_BUCKET_BYTES == KB * KB  # PyTorch's first bucket

# %% [markdown]
# Reverse order of registration: the last layer, whose gradient comes first, is in the first bucket. (PyTorch's DDP starts with this
# guess too, and after the first step sorts the buckets by the order in which gradients really came. Unless you say a size, its first
# bucket is smaller than the others, 1 MB, and goes early.)
#
# ## 6. See it overlap
#
# Between processes on one machine, messages are too quick to be seen. `SlowLink` is a hook that really all-reduces, and lets the
# result arrive when a cable of the given bandwidth would have brought it. `trace` records what each rank does when. First, how
# long does backward take with a perfect cable?

# %%
from ddp_course import trace
from ddp_course.network import SlowLink


def traced_steps(bucket_cap_mb, bandwidth, latency=0.0, steps=7):
    torch.manual_seed(0)
    hook = trace.recorded(SlowLink(bandwidth, latency))
    model = ddp.BucketedDDP(models.MLP(width=768, depth=5), bucket_cap_mb, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(256, 64), torch.randint(10, (256,))
    recorded = []
    for _ in range(steps):
        dist.barrier()  # begin together
        trace.clear()
        with trace.span("forward"):
            loss = F.cross_entropy(model(x), y)
        with trace.span("backward"):
            loss.backward()
            model.finish()
        with trace.span("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()
        recorded.append(trace.spans())
    return recorded[2:]  # the first ones warm up


# %% tags=["nbval-ignore-output"]
def quickest(run):
    """The spans of both ranks, of the step that took least time."""
    steps = [first + second for first, second in zip(*run.values, strict=True)]
    return min(steps, key=length)


def length(spans):
    return max(span["end"] for span in spans) - min(span["start"] for span in spans)


print("a perfect cable …")
perfect = quickest(launch(traced_steps, 25, bandwidth=float("inf")))
backward = trace.seconds(perfect, "backward")
nbytes = 4 * models.parameters_of(models.MLP(width=768, depth=5))
bandwidth = nbytes / backward
print(f"backward: {1000 * backward:.0f} ms; gradients: {nbytes / 1e6:.1f} MB")
print(f"the cable for this lesson: {bandwidth / 1e6:.0f} MB/s")

# %% [markdown]
# This cable takes as long for all gradients as backward takes to compute them. So at best nearly all of the communication is hidden.

# %%
hidden = predict.number(
    "Five buckets of up to 2.3 MB. Which share of the communication runs while the "
    "rank computes?", start=50, unit="%", low=0, high=100,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
print("one bucket …")
one = quickest(launch(traced_steps, 1000, bandwidth))
print("five buckets …")
several = quickest(launch(traced_steps, 2.3, bandwidth))
plots.timeline(
    {"one bucket": one, "five buckets": several},
    title="Buckets let communication hide under backward",
)

# %% tags=["nbval-ignore-output"]
share, share_of_one = trace.overlap(several), trace.overlap(one)
assert share_of_one < 0.02  # with one bucket nothing can be hidden
assert 0.15 < share < 1
hidden.compare(100 * share, title="Share of the communication that runs under compute")

# %% [markdown]
# Read the picture from left to right. With one bucket the orange lane begins when backward has ended, and the rank waits through all of
# it (hatched). With buckets the orange lane begins in the middle of backward, and what is shaded does not make the rank wait. The last
# bucket can never be hidden: it holds the first layer's gradient, and nothing is left to compute.
#
# So smaller buckets are better? Each message also has its latency, and each bucket is a message of its own. Now the same with a latency of
# 5 ms. In a ring of two a bucket takes two steps (lesson 02), so each bucket pays 10 ms.

# %% tags=["nbval-ignore-output"]
link, count = SlowLink(bandwidth, latency=0.005), {}
assert link.seconds(0, world_size=2) == 0.01
for cap in (0.001, 2.3, 1000):
    spans = quickest(launch(traced_steps, cap, bandwidth, link.latency))
    mine = [span for span in spans if span["rank"] == 0]
    count[cap] = sum(span["name"] == "all-reduce" for span in mine)
    wire, waits = trace.seconds(mine, "all-reduce"), trace.seconds(mine, "waiting")
    predicted = count[cap] * link.seconds(nbytes / count[cap], world_size=2)
    print(f"{count[cap]:2d} buckets: by the formula {1000 * predicted:3.0f} ms, "
          f"on the wire {1000 * wire:3.0f}, waited {1000 * waits:3.0f}")  # fmt: skip
    assert predicted <= wire * 1.001  # no message arrives early

assert list(count.values()) == [12, 5, 1]

# %% [markdown]
# Twelve buckets pay the latency twelve times. One bucket hides nothing. The default of 25 MB is a compromise, for networks much bigger
# than this one: a bucket should be so big that its latency does not matter, and so small that the first one goes early.
#
# ## 7. Is it right?
#
# A quick DDP that computes something else would be easy. Train a GPT, whose input and output share one *tied* weight, for five steps in
# float64: in one process on the full batch, with PyTorch's DDP, with the twenty lines of section 4, and with buckets.


# %%
def five_steps(how):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # ranks begin unequal: DDP has to see to it
    model = inner = models.GPT(30, context=16, width=32, heads=2).double()
    if how == "torch":
        model = DistributedDataParallel(inner, bucket_cap_mb=0.02)
    if how == "twenty lines":
        model = Overlapped(inner)
    if how == "buckets":
        model = ddp.BucketedDDP(inner, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(5):
        text = torch.randint(30, (8, 17), generator=numbers)[rank::world_size]
        logits = model(text[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        if how in ("twenty lines", "buckets"):
            model.finish()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in inner.parameters()])


# %% tags=["nbval-ignore-output"]
alone = launch(five_steps, "one process", nproc=1).values[0]
furthest = {}
for how in ("torch", "twenty lines", "buckets"):
    print(how, "…")
    for weights in launch(five_steps, how, nproc=2).values:
        furthest[how] = (weights - alone).abs().max().item()
        assert furthest[how] < 1e-10  # float64 rounding, through five steps of AdamW
print("furthest from one process:", {how: f"{gap:.0e}" for how, gap in furthest.items()})

# %% [markdown]
# ## 8. Break it: around the wrapper
#
# Now PyTorch's DDP. Somebody needs a method of the network inside, and writes `model.module(x)`.

# %%
around = predict.choose(
    "Forward through `model.module(x)`, then backward. What happens?",
    ["an error", "no difference", "gradients are not averaged", "it hangs"],
)


# %% tags=["nbval-ignore-output"]
def around_the_wrapper(careless, steps=30):
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = data.shard(data.digits()[0], micro_batch=16)
    for step, (x, y) in zip(range(steps), loader, strict=False):
        loss = F.cross_entropy(model.module(x) if careless else model(x), y)
        loss.backward()
        report(step=step, distance=distance(model), loss=loss)
        optimizer.step()
        optimizer.zero_grad()


through = {
    "model.module(x)": launch(around_the_wrapper, True),
    "model(x)": launch(around_the_wrapper, False),
}
plots.drift(through, title="Forward through model.module: ranks drift apart in silence")

# %%
careless, careful = (distances(run) for run in through.values())
assert careless[-1] > careless[9] > 0
assert set(careful) == {0.0}
for rank in (0, 1):
    fell = losses(through["model.module(x)"], rank)
    assert fell[-1] < fell[0]
around.compare("gradients are not averaged")

# %% [markdown]
# **Symptom.** No error; both losses fall; the ranks drift, as in section 1. **Cause.** DDP prepares each backward in its own
# `forward`: only there does it arm its hooks. Go around it, and they stay asleep. **Fix.** Train through `model(x)`, as the other line of
# the picture did. Use `model.module` to evaluate and to save. If training needs another method, call it from the network's `forward`.
#
# ## 9. Break it: a parameter that the loss does not use
#
# A network with two heads, of which today's loss uses one.


# %%
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.digit, self.parity = (
            nn.Linear(*s) for s in ((64, 8), (8, 10), (8, 2))
        )

    def forward(self, x):
        return self.digit(self.body(x))  # parity is not used


def two_steps(freeze=False, **options):
    net = TwoHeads()
    if freeze:
        net.parity.requires_grad_(False)
    model = DistributedDataParallel(net, **options)
    for step in range(2):
        loss = F.cross_entropy(model(torch.randn(4, 64)), torch.arange(4))
        report(step=step)  # this forward went well
        loss.backward()
    return net.parity.weight.grad


# %% tags=["nbval-ignore-output"]
error, forwards = None, []
try:
    launch(two_steps, on_record=lambda record: forwards.append(record["step"]))
except RankError as caught:
    error = caught
    message = error.traceback
    print(message[message.index("RuntimeError") :][:330], "…")

assert "Expected to have finished reduction in the prior iteration" in message
assert set(forwards) == {0}  # the second forward raised it

# %% [markdown]
# **Symptom.** The error comes in the *second* forward, though the mistake was in the first. **Cause.** A bucket waits for all of its
# gradients. One that never comes keeps the bucket from going; DDP notices when the next forward finds it half full. **Fix.** Use
# every output in the loss, or freeze what you do not train *before* you wrap, or say `find_unused_parameters=True`: DDP then looks
# through the graph in every step, which costs time, so only where needed.

# %%
frozen = launch(two_steps, freeze=True).values
searched = launch(two_steps, find_unused_parameters=True).values
print("gradient of the unused head:", frozen, "and", searched)
assert frozen == searched == [None, None]

# %% [markdown]
# Ours fills such a gap with zeros in `finish`, so that all ranks send the same buckets.
#
# > **Predict.** Only rank 0 uses the second head, and gets a gradient of 4 there. What do the two ranks hold after `finish`?


# %%
def used_on_rank_0():
    model = ddp.BucketedDDP(TwoHeads())
    ones = torch.ones(4, 64)
    loss = model(ones).sum()
    if dist.get_rank() == 0:
        loss = loss + model.module.parity(ones[:, :8]).sum()  # 4 samples: gradient 4
    loss.backward()
    model.finish()
    return model.module.parity.weight.grad.unique().tolist()


print(both_ranks := launch(used_on_rank_0).values)
assert both_ranks == [[2.0], [2.0]]

# %% [markdown]
# The mean over the ranks, one of which had nothing to say.
#
# ## 10. Break it: two forwards before a backward
#
# BatchNorm keeps running statistics in *buffers*, which have no gradient. Every rank sees other images, so these would drift too.
# PyTorch's DDP therefore copies rank 0's buffers to all ranks before a forward. Let us do that by hand, and run two forwards before
# one backward, as a loss that compares two images does.


# %%
import inspect

known = inspect.signature(DistributedDataParallel).parameters
# newer releases of PyTorch rename the option
NO_COPIES = next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in known)


def copy_buffers(model):
    for buffer in model.buffers():
        received = buffer.clone()
        dist.broadcast(received, src=0)
        buffer.copy_(received)


# %%
def compare_two(how):
    net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8))
    model = net
    if how in ("torch", "no copies"):
        options = {} if how == "torch" else {NO_COPIES: False}
        model = DistributedDataParallel(net, **options)
    first, second = torch.randn(2, 16, 64)
    if how == "one forward":
        copy_buffers(model)
        left, right = model(torch.cat([first, second])).chunk(2)
    else:
        if how == "by hand":
            copy_buffers(model)
        left = model(first)
        if how == "by hand":
            copy_buffers(model)
        right = model(second)
    (left - right).pow(2).mean().backward()
    return net[0].weight.grad.norm().item()


# %% tags=["nbval-ignore-output"]
error = None
try:
    launch(compare_two, "by hand")
except RankError as caught:
    error = caught
    print(str(error).splitlines()[-1][:165], "…")

assert "modified by an inplace operation" in str(error)

# %% [markdown]
# **Cause.** The first forward remembers the buffers for its backward; the second copy writes over them, in place, and autograd notices.
# **Fix.** One forward for both halves. (It is another network then: BatchNorm sees 32 images at once.) Or tell DDP not to
# copy buffers: `broadcast_buffers=False`, in newer releases `forward_sync_buffers=False`. And what does DDP itself do, in the PyTorch
# on *this* machine?

# %% tags=["nbval-ignore-output"]
for how in ("one forward", "no copies"):
    assert min(launch(compare_two, how).values) > 0
    print(f"{how}: fine")
try:
    launch(compare_two, "torch")
    verdict = "copies the buffers without autograd's knowledge: no error"
except RankError as caught:
    assert "modified by an inplace operation" in str(caught)
    verdict = "raises the error"
print(f"DDP of PyTorch {torch.__version__}: {verdict}")

# %% [markdown]
# Releases differ (PyTorch's issue 175024 reports the error, its pull request 175851 hides the copies from autograd). Where the error is
# not raised, nothing is lost for BatchNorm in training, since its backward uses the batch's own statistics; a buffer that *does* enter
# the backward would silently be the newer one.
#
# ## 11. Break it: everything frozen

# %% tags=["nbval-ignore-output"]
error = None
try:
    launch(lambda: DistributedDataParallel(models.MLP(width=8).requires_grad_(False)))
except RankError as caught:
    error = caught
    print(str(error).splitlines()[-1])

assert "doesn't have any parameter" in str(error) and "requires a gradient" in str(error)

# %% [markdown]
# **Cause.** No gradient, nothing to average: DDP refuses. You meet it when you freeze a network, wrap it, and train only a new head.
# **Fix.** Wrap what trains, and run the frozen part outside of the wrapper.


# %%
def only_the_head():
    torch.manual_seed(dist.get_rank())  # other images, other weights
    body = nn.Linear(64, 8).requires_grad_(False)
    head = DistributedDataParallel(nn.Linear(8, 10))
    F.cross_entropy(head(body(torch.randn(4, 64))), torch.arange(4)).backward()
    return head.module.weight.grad


first, second = launch(only_the_head).values
assert torch.equal(first, second)
print("the head's gradient is averaged")

# %% [markdown]
# (Here the two bodies differ: DDP broadcasts only what it wraps. Load the same frozen weights on every rank.)
#
# ## Quiz

# %%
from ddp_course import quiz

quiz.ask("04_ddp_from_scratch")

# %% [markdown]
# ## Exercises
#
# * [04_average_gradients](../exercises/04_average_gradients.ipynb): average the gradients of a given
#   model over the ranks, also those of a branch that only some ranks used, while frozen parameters stay without a gradient.
# * [04_bucketed_ddp](../exercises/04_bucketed_ddp.ipynb): write the hooks and the buckets of your own DDP. It is checked against the mean
#   that PyTorch's gives, and for sending while backward still runs.
#
# ## How this looks on several GPUs and nodes
#
# The same code. On GPUs the all-reduce runs in a stream of its own, beside the kernels of backward. Between the GPUs of a node the
# links are fast, and there is less to hide; between nodes they are slower, and overlap counts for more: lesson 10 dials the bandwidth and
# looks.
#
# ## Where to read more
#
# * S. Li and others, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020: why buckets, why in
#   this order, measured.
# * The PyTorch documentation: *DistributedDataParallel* (class), *Distributed Data Parallel* (notes), *DDP Communication Hooks*.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- never averaged: {never[-1]:.2f} apart after {len(never)} steps,
  different answers for {disagree["never averaged"]} of {len(labels)} images; averaged: exactly 0
- averaged gradient against the full batch's: {equal:.0e} with equal counts,
  {unequal_counts:.0%} off with unequal ones
- communication under compute: one bucket {share_of_one:.0%}, five {share:.0%}
- furthest from one process after five steps: torch's DDP {furthest["torch"]:.0e},
  ours {furthest["buckets"]:.0e}
- forward through model.module: {careless[-1]:.2f} apart after {len(careless)} steps""")
