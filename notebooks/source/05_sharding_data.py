# %% [markdown]
# # 05 · Sharding data
#
# **What you will do.** Deal a data set out to ranks by hand, draw who got what, and then break it in the five ways in which it
# breaks in practice: the same order every epoch, samples counted twice, ranks that draw the same random numbers, ranks with more
# batches than others, and ranks with more samples than others.
#
# **What you will learn.** What `DistributedSampler` does, and what it silently adds; how to evaluate exactly; where seeds belong; when
# the mean of means is not the mean.
#
# **What you need.** Lessons 00, 02 and 04. About 25 minutes.
#
# ---
# **The question.** Every rank trains on its own part of the data. Nothing tells you when the parts are wrong: no error, a loss that
# falls, an accuracy that looks right. How do you know who saw what?

# %% [markdown]
# ## 1. Dealing by hand
#
# Two rules make ranks agree without a word between them: all ranks shuffle *with the same seed*, so they hold the same order, and each takes
# every `world_size`-th index, starting at its own rank. As with cards.
#
# > **Predict.** 12 samples, 3 ranks, no shuffling. Which samples does rank 1 get?

# %%
from ddp_course import predict

guess = predict.choose(
    "12 samples, 3 ranks, in order: rank 1 gets …",
    ["4, 5, 6, 7", "1, 4, 7, 10", "0, 3, 6, 9"],
)

# %%
import torch


def deal(samples, rank, world_size, epoch=0, shuffle=True, seed=0):
    """The indices of this rank, in the order in which it takes them."""
    order = list(range(samples))
    if shuffle:
        generator = torch.Generator().manual_seed(seed + epoch)
        order = torch.randperm(samples, generator=generator).tolist()
    missing = -samples % world_size  # so that all ranks get equally many:
    order += (order * missing)[:missing]  # from the front, round and round if need be
    return order[rank::world_size]


mine = deal(12, rank=1, world_size=3, shuffle=False)
guess.compare(", ".join(map(str, mine)))

# %% [markdown]
# That is all of `DistributedSampler`. Proof on real ranks, for sizes that divide and sizes that do not.

# %%
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from ddp_course import launch, plots


def compare(samples, epoch, shuffle):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(range(samples), shuffle=shuffle)
    sampler.set_epoch(epoch)
    return list(sampler) == deal(samples, rank, world_size, epoch, shuffle)


cases = ((24, 0, True), (24, 3, True), (22, 1, True), (22, 0, False), (1, 0, True))
for case in cases:
    assert launch(compare, *case, nproc=4).values == [True] * 4
print("deal() and DistributedSampler agree on every rank")

# %% [markdown]
# ## 2. Break it: the same order every epoch
#
# A training loop over three epochs. It runs, the loss falls.
#
# > **Predict.** How many *different* orders do the ranks go through in three epochs of this loop?

# %%
orders = predict.number(
    "How many different orders in three epochs?", start=3, unit="orders"
)


# %%
def three_epochs(samples, remember):
    sampler = DistributedSampler(range(samples))
    epochs = []
    for epoch in range(3):
        if remember:
            sampler.set_epoch(epoch)
        epochs.append(list(sampler))
    return epochs


def grid(values, samples, title=None):
    """One row an epoch: which rank got which sample."""
    rows = {f"epoch {e}": [rank[e] for rank in values] for e in range(3)}
    return plots.index_grid(rows, samples, title)


def different(values):
    return len({str(epoch) for epoch in values[0]})


forgotten = launch(three_epochs, 24, remember=False).values
print("different orders:", different(forgotten))
assert different(forgotten) == 1

# %% tags=["nbval-ignore-output"]
grid(forgotten, 24, "Without set_epoch each rank gets the same samples every epoch")

# %% tags=["nbval-ignore-output"]
orders.compare(different(forgotten), title="Three epochs, one order")

# %% [markdown]
# The sampler is told to shuffle, and it does: with the same seed every time. Every epoch has the same batches in the same order, and rank 0
# never sees the samples of rank 1. **Cause:** the order depends on `seed + epoch`, and nobody told the sampler which epoch it is. (A
# single-process `DataLoader(shuffle=True)` needs no such line: that is why it is forgotten.) **Fix:** one line.

# %% tags=["nbval-ignore-output"]
reshuffled = launch(three_epochs, 24, remember=True).values
assert different(reshuffled) == 3
grid(reshuffled, 24, "With set_epoch every epoch deals anew")

# %%
for epochs in (forgotten, reshuffled):
    for epoch in range(3):
        dealt = sorted(index for rank in epochs for index in rank[epoch])
        assert dealt == list(range(24))
print("in each epoch, each sample goes to exactly one rank")

# %% [markdown]
# Either way each sample is seen once an epoch. So the mistake changes no sum that you would look at, only how random your training is.
#
# ## 3. Break it: samples that count twice
#
# 24 samples divide by four. 22 do not.
#
# > **Predict.** 22 samples, 4 ranks. How many samples do the four ranks process together?

# %%
processed = predict.number(
    "22 samples on 4 ranks: how many are processed?", start=22, unit="samples"
)


# %%
def dealt(samples, drop_last=False):
    return list(DistributedSampler(range(samples), shuffle=False, drop_last=drop_last))


def each_once(samples):
    return list(range(dist.get_rank(), samples, dist.get_world_size()))


padded = launch(dealt, 22, nproc=4).values
dropped = launch(dealt, 22, drop_last=True, nproc=4).values
once = launch(each_once, 22, nproc=4).values
for name, ranks in {"padded": padded, "dropped": dropped, "each once": once}.items():
    print(f"{name}: {[len(own) for own in ranks]} = {sum(map(len, ranks))} samples")
assert [sum(map(len, ranks)) for ranks in (padded, dropped, once)] == [24, 20, 22]

# %% tags=["nbval-ignore-output"]
plots.index_grid(
    {"DistributedSampler": padded, "drop_last=True": dropped, "range(rank, 22, 4)": once},
    22,
    "22 samples, 4 ranks: two dealt twice, two left out, or each one once",
)

# %% tags=["nbval-ignore-output"]
total = sum(map(len, padded))
processed.compare(total, title="DistributedSampler pads: 22 samples become 24")

# %% [markdown]
# Every rank must take part in every all-reduce, so all get equally many samples: the sampler deals the first ones a second time. For
# *training* that is harmless, a sample more or less in an epoch. For *evaluation* it is not. Let us train a small network and evaluate it
# on 21 digits it has never seen, as a reader of a paper would: "accuracy on the test set".


# %%
import torch.nn.functional as F

from ddp_course import data, models


def trained(epochs=2):
    torch.set_num_threads(1)  # small tensors: threads would mostly wait for each other
    torch.manual_seed(0)
    model = models.MLP(width=64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        loader = data.shard(data.digits()[0], micro_batch=64)
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.state_dict()


weights = launch(trained, nproc=1).values[0]

# %%
model = models.MLP(width=64)
model.load_state_dict(weights)
x, y = data.digits()[1].tensors
right = model(x).argmax(1) == y
few = torch.cat([(~right).nonzero().flatten()[:7], right.nonzero().flatten()[:14]])
true_accuracy = right[few].double().mean().item()
print(
    f"{len(few)} digits, the network gets {right[few].sum()} right: {true_accuracy:.4f}"
)
assert right[few].sum() == 14

# %% [markdown]
# 14 of 21, two thirds. We picked them so that the digits it gets wrong come first: real test sets are often sorted, too. Now on ranks,
# with the sampler that served well for training.
#
# > **Predict.** The same weights, the same 21 digits, evaluated on 1, 2, 4 and 5 ranks. Does the accuracy change?

# %%
changes = predict.choose(
    "The accuracy of the same weights on 1, 2, 4 and 5 ranks is …",
    ["the same on all", "higher with more ranks", "lower with more ranks"],
)


# %%
@torch.no_grad()  # no graph is kept
def accuracy(weights, which, exact):
    model = models.MLP(width=64)
    model.load_state_dict(weights)
    model.eval()  # dropout and BatchNorm, if there are any, hold still
    x, y = data.digits()[1].tensors
    mine = each_once(len(which)) if exact else dealt(len(which))
    mine = which[mine]
    correct = (model(x[mine]).argmax(1) == y[mine]).sum()
    sums = torch.tensor([correct, len(mine)], dtype=torch.float64)
    dist.all_reduce(sums)  # sums of counts, not means of means
    return (sums[0] / sums[1]).item()


# %%
ranks = (1, 2, 4, 5)
padded = {n: launch(accuracy, weights, few, False, nproc=n).values[0] for n in ranks}
exact = {n: launch(accuracy, weights, few, True, nproc=n).values[0] for n in ranks}
for n in ranks:
    print(f"{n} rank(s): padded {padded[n]:.4f}, each once {exact[n]:.4f}")
assert all(value == true_accuracy for value in exact.values())
assert true_accuracy == padded[1] > padded[2] > padded[4] > padded[5]

flattered = launch(accuracy, weights, few.flip(0), False, nproc=4).values[0]
print(f"the easy digits first, on 4 ranks: padded {flattered:.4f}")
assert flattered > true_accuracy
changes.compare("lower with more ranks")

# %% [markdown]
# The number depends on how many ranks computed it. Padding repeats the *first* samples, and here those are hard ones: 3 of 24 count twice on four
# ranks. With easy ones in front it flatters. On a big test set the effect is small, and there it hides: 10,000 images on 64 ranks are
# 10,048, enough to differ in the fourth digit from what everybody else reports.
#
# **Fix:** deal without padding, add up *counts* over the batches, and all-reduce the two sums once at the end. Ranks may then hold different numbers of
# samples, which is why no collective may stand inside the loop. (In the middle of a training, put the model back into the mode it came in.)
# `data.exact_shard` is that deal, as a loader: a plain `range` serves as its sampler.

# %%
from ddp_course import show

show.source(data.exact_shard)

# %%
test_set = data.digits()[1]


def items_seen():
    return [len(y) for _, y in data.exact_shard(test_set, micro_batch=50)]


seen = launch(items_seen, nproc=7).values
print(seen)
assert sum(map(sum, seen)) == len(test_set) == 360

# %% [markdown]
# ## 4. Break it: ranks that roll the same dice
#
# Training often adds randomness: a flip, a crop, dropout. And all ranks call `torch.manual_seed(0)`, because the weights must start
# equal. Two ranks, four random shifts each.
#
# > **Predict.** How many *different* shifts do the two ranks draw together?

# %%
shifts = predict.number(
    "Two ranks draw four each: how many are different?", start=8, unit="shifts"
)


# %%
def augmented(own_seed):
    torch.manual_seed(0)
    model = models.MLP(width=64)  # the same weights on all ranks
    if own_seed:
        torch.manual_seed(1000 + dist.get_rank())
    drawn = torch.rand(4)
    return drawn.tolist(), sum(weight.sum().item() for weight in model.parameters())


def distinct(values):
    return len({shift for drawn, _ in values for shift in drawn})


same_dice = launch(augmented, own_seed=False).values
own_dice = launch(augmented, own_seed=True).values
print("one seed for all:", distinct(same_dice), "different shifts of 8")
print("seed + rank:     ", distinct(own_dice), "different shifts of 8")
assert (distinct(same_dice), distinct(own_dice)) == (4, 8)
for values in (same_dice, own_dice):
    assert values[0][1] == values[1][1]  # the weights are equal either way

# %% tags=["nbval-ignore-output"]
shifts.compare(
    distinct(same_dice), title="With one seed, both ranks draw the same four shifts"
)

# %% [markdown]
# With one seed for all, rank 1 augments in lockstep with rank 0: half of the variety that you think you have. **Fix:** one seed for what must be equal
# (weights, the sampler's order), then, *after* the model is built, `seed + rank` for what must differ.
#
# The same happens once more inside a `DataLoader` with workers. Each worker process has dice of its own, and what they begin with comes from the *loader's
# generator*:


# %%
from torch.utils.data import DataLoader


def worker_noise(own_seed):
    seed = 7 + (dist.get_rank() if own_seed else 0)
    loader = DataLoader(
        torch.zeros(4, 1),
        batch_size=None,
        collate_fn=torch.rand_like,  # stands for a random augmentation
        num_workers=2,
        generator=torch.Generator().manual_seed(seed),
    )
    return [round(noise.item(), 3) for noise in loader]


same, own = launch(worker_noise, False).values, launch(worker_noise, True).values
print("the same generator on both ranks:", "equal noise" if same[0] == same[1] else "?")
print("seed + rank for the generator:   ", "other noise" if own[0] != own[1] else "?")
assert same[0] == same[1] and not set(own[0]) & set(own[1])

# %% [markdown]
# `data.shard` gives its loader `seed + rank`, and its sampler `seed`. Look for both in its source:

# %%
show.source(data.shard)

# %% [markdown]
# ## 5. Break it: one rank has a batch more
#
# Not all data comes through a sampler that pads. A stream, a folder of files for each rank, a filter: suddenly rank 0 has five batches and rank 1 has four.
#
# > **Predict.** What happens in the fifth step of rank 0?

# %%
fifth = predict.choose(
    "Rank 0 has one batch more than rank 1. In that step …",
    ["rank 0 trains on alone", "rank 0 waits for ever", "an error is raised at once"],
)

# %%
from torch.nn.parallel import DistributedDataParallel

from ddp_course import HangError


def batches(rank, count, samples=8):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        x = torch.randn(samples, 64, generator=generator, dtype=torch.float64)
        yield x, torch.randint(10, (samples,), generator=generator)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(64, 10, dtype=torch.float64)


def uneven(batch_counts):
    rank = dist.get_rank()
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in batches(rank, batch_counts[rank]):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


# %% tags=["nbval-ignore-output"]
error = None
try:
    launch(uneven, (5, 4))
except HangError as caught:
    error = caught
    print(error)

assert "rank 0 waits in all_reduce" in str(error)
assert "rank 1 had returned" in str(error)
fifth.compare("rank 0 waits for ever")

# %% [markdown]
# A hang. Rank 0's backward all-reduces its gradients, and nobody answers. (`launch` noticed, because rank 1 had returned. Under `torchrun` you wait for the
# process group's time-out: half an hour by default with gloo.)
#
# **Fix.** `Join` lets a rank that has run out *shadow* the others: it goes on answering their all-reduces, with zeros, until all are through.


# %%
from torch.distributed.algorithms.join import Join


def joined(batch_counts):
    rank, taken = dist.get_rank(), 0
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for x, y in batches(rank, batch_counts[rank]):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            taken += 1
    return taken, model.module.state_dict()


(steps_0, after_0), (steps_1, after_1) = launch(joined, (5, 4)).values
print(f"rank 0 took {steps_0} steps, rank 1 took {steps_1}")
assert (steps_0, steps_1) == (5, 4)
assert all(torch.equal(after_0[name], after_1[name]) for name in after_0)
print("and their weights are equal in the end, bit for bit")

# %% [markdown]
# What did the fifth step learn from? From rank 0's gradient and rank 1's zeros, divided by two ranks.
#
# > **Predict.** What share of rank 0's gradient is left in that step?

# %%
part = predict.number("The share of rank 0's gradient in the fifth step?", start=1)

# %% tags=["nbval-ignore-output"]
_, before = launch(joined, (4, 4)).values[0]  # the weights after four steps
model = linear()
model.load_state_dict(before)
*_, (x, y) = batches(0, 5)  # rank 0's fifth batch
F.cross_entropy(model(x), y).backward()

moved = before["weight"] - after_0["weight"]  # learning rate × gradient that was used
share = (moved.norm() / (0.1 * model.weight.grad.norm())).item()
assert (moved - 0.05 * model.weight.grad).abs().max() < 1e-12  # float64 rounding
part.compare(share, title="The last step takes half of a gradient", unit="share")

# %% [markdown]
# `Join` keeps your run alive; it does not make uneven data fair. Where you can, deal evenly: pad, or drop. And `Join` only shadows collectives of the objects in its
# list. An `all_reduce` of your own in the loop, of the loss, say, has no shadow.
#
# > **Predict.** What does it meet on rank 1, which has run out of batches?


# %%
def joined_with_own_all_reduce(batch_counts):
    rank = dist.get_rank()
    model = DistributedDataParallel(linear())
    with Join([model]):
        for x, y in batches(rank, batch_counts[rank]):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            dist.all_reduce(loss.detach())


# %% tags=["nbval-ignore-output"]
from ddp_course import RankError

error = None
try:
    launch(joined_with_own_all_reduce, (5, 4))
except (RankError, HangError) as caught:
    error = caught
    print(error)
assert error is not None

# %% [markdown]
# It met a collective of `Join`'s own, of another shape. **Fix.** Inside `Join` no collective but the model's; all-reduce sums and counts after the loop.
#
# ## 6. Break it: one rank has more samples
#
# The last trap is the quietest. All ranks have equally many batches, nothing hangs, but rank 0's batch holds six samples and rank 1's holds two. DDP averages
# the two gradients.
#
# > **Predict.** By how many times as much does a sample on rank 1 count in that average, compared with one on rank 0?

# %%
weight = predict.number(
    "How many times as much does a sample of rank 1 count?", start=1, unit="times"
)


# %%
def gradient(weighted):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(linear())
    ((x, y),) = batches(rank, 1, samples=6 if rank == 0 else 2)
    if weighted:
        count = torch.tensor(len(y))
        dist.all_reduce(count)  # 8
        loss = F.cross_entropy(model(x), y, reduction="sum") / (count / world_size)
    else:
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    return model.module.weight.grad, x, y


def full_batch(values):
    model = linear()
    _, x, y = zip(*values, strict=True)
    x, y = torch.cat(x), torch.cat(y)
    F.cross_entropy(model(x), y).backward()
    return model.weight.grad


# %%
naive, weighted = launch(gradient, False).values, launch(gradient, True).values
wanted = full_batch(naive)
off = ((naive[0][0] - wanted).norm() / wanted.norm()).item()
exact_off = ((weighted[0][0] - wanted).norm() / wanted.norm()).item()

# %% tags=["nbval-ignore-output"]
print(f"mean of means: {off:.0%} off the gradient of the eight samples")
print(f"count-weighted: {exact_off:.0e} off")
assert off > 0.1
assert exact_off < 1e-12  # float64 rounding
weight.compare(6 / 2, title="A sample on rank 1 counts three times", source="computed")

# %% [markdown]
# The mean of two means is the mean only when both are of equally many. Rank 0's six samples share half of the average, a twelfth each; rank 1's two share the
# other half, a quarter each. Three times as much.
#
# **Fix.** Each rank *sums* its losses and divides the sum by the global count over the world size. DDP adds up these quotients and divides by the world size: the sum of all, over the
# count of all.
# With text it matters most: sequences have different lengths, and it is *tokens* that count (lesson 07). In the package, the divisor is this:

# %%
from ddp_course import accumulation

show.source(accumulation.Window.divisor)

# %% [markdown]
# Two more lines for your own code that catch most of this lesson: print `len(loader)` and the number of samples *of every rank*, once, at the start.
#
# ## Quiz

# %%
from ddp_course import quiz

quiz.ask("05_sharding_data")

# %% [markdown]
# ## Exercises
#
# * [05_shard_indices](../exercises/05_shard_indices.ipynb): write the deal, with shuffling, epochs and padding, so that ranks agree without talking.
# * [05_exact_accuracy](../exercises/05_exact_accuracy.ipynb): an accuracy that is the same on any number of ranks, also when a rank has nothing to do.
#
# ## How this looks on several GPUs and nodes
#
# The sampler counts over *all* ranks: `RANK` and `WORLD_SIZE`, never `LOCAL_RANK`, or every node trains on the same data. With 1,024 ranks padding can repeat up to 1,023
# samples. Streaming data sets have no index to deal: each rank (and each of its loader's workers) skips to its own part, and uneven ends are the rule; there one cuts at the shortest rank, or
# uses `Join`.
#
# ## Where to read more
#
# The PyTorch documentation on `torch.utils.data.distributed.DistributedSampler`, on randomness in multi-process data loading
# (`torch.utils.data`), and on `torch.distributed.algorithms.join`. *S. Li and others*, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- orders in three epochs: {different(forgotten)},
  with set_epoch: {different(reshuffled)}
- 22 samples on four ranks: {total} processed
- accuracy of one model: {exact[4]:.3f}, and padded on four ranks {padded[4]:.3f}
- different shifts of 8: one seed for all {distinct(same_dice)},
  seed + rank {distinct(own_dice)}
- one batch more on rank 0: a hang; with Join {steps_0} and {steps_1} steps
- six and two samples: the mean gradient {off:.0%} off, count-weighted {exact_off:.0e}""")
