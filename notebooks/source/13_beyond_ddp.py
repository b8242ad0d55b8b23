# %% [markdown]
# # 13 · Beyond DDP
#
# **What you will do.** Train one small GPT in six ways on two ranks: DDP, ZeRO-1 by hand, torch's ZeRO-1, FSDP, tensor and pipeline parallelism.
# Count what each rank holds and sends. Then choose for big models, and compare with what their authors chose.
#
# **What you will learn.** What can be shared out, what it costs on the wire, and how to go from a model and a cluster to a strategy.
#
# **What you need.** Lessons 01, 04 and 06. About 70 minutes: sections 1 to 3 and the exercise, then, perhaps another day, 4 to 8.
#
# ---
# **The question.** DDP holds everything on every rank. Your model is too big for that. What do you split: the optimizer, the layers, or each layer?

# %%
import functools
import math
import re

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_course
from ddp_course import data, flight, memory, models, plots, predict, show, zero

launch = functools.partial(ddp_course.launch, backend="gloo")  # this lesson is on the CPU

# %% tags=["nbval-ignore-output"]
NAMES = ["data (DDP)", "sharded data (ZeRO, FSDP)", "tensor", "pipeline"]
plots.strategies(NAMES, title="Four ways to share out training on two ranks")

# %% [markdown]
# ## 1. What DDP holds twice
#
# The model of this lesson reads the Python manual. Its output weights are *not* tied to the embedding, as they are in `models.GPT`: in a pipeline the two
# will be on different ranks. Five global batches of 16 pieces of text are given; every way to train must end with the weights that one process gets.

# %%
text, _ = data.characters(context=64)
x, y = (torch.stack(part) for part in zip(*(text[i] for i in range(80)), strict=True))
BATCHES = list(zip(x.split(16), y.split(16), strict=True))
LETTERS = len(text.vocabulary)


def new_model():
    torch.manual_seed(0)
    model = models.GPT(LETTERS, width=64, layers=2)
    model.head.weight = nn.Parameter(model.token.weight.detach().clone())
    return model


PARAMETERS = models.parameters_of(new_model())


# %%
def held(model, optimizer):
    """Count the bytes that this rank holds: of a sharded tensor its own shard."""
    parameters = list(model.parameters())
    return memory.Memory(
        weights=sum(zero.local(p).nbytes for p in parameters),
        gradients=sum(zero.local(p.grad).nbytes for p in parameters),
        optimizer_state=zero.state_bytes(optimizer),
    )


def weights_of(model):
    parts = [
        p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()
    ]
    return torch.cat([part.detach().flatten() for part in parts])


# %% [markdown]
# A *way* makes a model and an optimizer for its rank. Each rank takes its part of every global batch. It returns three things: the model, the optimizer to step, and the one that holds
# Adam's state (the same, except in ZeRO-1, where it is inside).


# %%
def plain(model):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return model, optimizer, optimizer


def ddp(model):
    return plain(DistributedDataParallel(model))


def train(way, same_batch=False):
    """Return what this rank holds, the weights after five steps, the last step's calls."""
    model, optimizer, keeper = way(new_model())
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for x, y in BATCHES:
        before = len(flight.log())
        if not same_batch:
            x, y = x[rank::world_size], y[rank::world_size]
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    calls = flight.log()[before:]
    return held(model, keeper), weights_of(model), calls


# %% tags=["nbval-ignore-output"]
alone, wanted, _ = launch(train, plain, nproc=1).values[0]
measured = {"DDP": launch(train, ddp).values[0]}


def error(name):
    """The largest distance of a weight from its place in one process, by its size."""
    return ((measured[name][1] - wanted).abs().max() / wanted.abs().max()).item()


for part, value in measured["DDP"][0].parts().items():
    print(f"{part:16} {memory.in_bytes(value)}")
assert measured["DDP"][0].parts() == alone.parts()  # nothing is shared out
assert error("DDP") < 1e-3

# %% [markdown]
# (Activations are not counted here; section 7 does.) Each of the two ranks holds what one process holds: weights and gradients once, Adam's state twice that. But only *one* rank needs to know how a weight moves, if it
# tells the others. That is ZeRO: the **Ze**ro **R**edundancy **O**ptimizer.
#
# ## 2. ZeRO-1 by hand
#
# All parameters are one long vector. Rank k owns the k-th part of it, and keeps Adam's state for this part only. A step is then
#
# 1. **reduce-scatter**: each rank gets the mean gradient of *its* part;
# 2. Adam steps this part;
# 3. **all-gather**: each rank gets everybody's new weights.

# %%
state = alone.optimizer_state / 1e6
guess = predict.number(
    f"Adam's state takes {state:.2f} MB in one process. "
    "How much does each of four ranks keep under ZeRO-1?",
    start=round(state, 2),
    unit="MB",
)

# %% [markdown]
# In plain torch, for a model whose number of parameters the world size divides:


# %%
def zero1_steps():
    """Five steps; return the weights and the bytes of Adam's state on this rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = new_model()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    share = nn.Parameter(flat.chunk(n)[rank].clone())
    adam = torch.optim.Adam([share], 1e-3)
    for x, y in BATCHES:
        loss = F.cross_entropy(model(x[rank::n]).flatten(0, 1), y[rank::n].flatten())
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        share.grad = torch.empty_like(share)
        dist.reduce_scatter(share.grad, list(gradient.chunk(n)))  # a sum …
        share.grad /= n  # … now the mean
        adam.step()
        shares = list(flat.chunk(n))  # views: what arrives is written into flat
        dist.all_gather(shares, share.detach())
        nn.utils.vector_to_parameters(flat, parameters)
    return flat, zero.state_bytes(adam)


# %% tags=["nbval-ignore-output"]
kept = {}
for ranks in (1, 2, 4):
    run = launch(zero1_steps, nproc=ranks)
    weights, kept[ranks] = run.values[-1]
    off = ((weights - wanted).abs().max() / wanted.abs().max()).item()
    print(f"{ranks} rank(s): {memory.in_bytes(kept[ranks])} of state on each, "
          f"weights off by {off:.0e}")  # fmt: skip
    assert off < 1e-3  # another order of sums, and Adam divides by small numbers
assert kept[1] == 2 * kept[2] == 4 * kept[4] == alone.optimizer_state
guess.compare(kept[4] / 1e6)

# %% [markdown]
# The state is divided by the world size, exactly; the weights are Adam's to rounding. `zero.ShardedAdam` is the same as a class, for any number of parameters: `_flat` joins them and pads with
# zeros until the world size divides the length, `_mine` takes this rank's share, `_write` copies back.

# %%
show.source(zero.ShardedAdam.__init__, zero.ShardedAdam.step, zero.reduce_scatter_mean)

# %% [markdown]
# And torch has its own, beside DDP. It gives each rank whole parameters, not slices, so that shares are uneven for a model with few of them.

# %%
from torch.distributed.optim import ZeroRedundancyOptimizer


def zero1(model):
    optimizer = zero.ShardedAdam(model.parameters(), lr=1e-3)
    return model, optimizer, optimizer.adam


def torch_zero1(model):
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-3)
    return model, optimizer, optimizer.optim


# %% tags=["nbval-ignore-output"]
measured["ZeRO-1"] = launch(train, zero1).values[0]
both = launch(train, torch_zero1).values
measured["torch's ZeRO-1"] = both[0]
for rank, value in enumerate(both):
    print(f"torch's, rank {rank}: {memory.in_bytes(value[0].optimizer_state)} of state")
assert sum(value[0].optimizer_state for value in both) == alone.optimizer_state
assert max(error("ZeRO-1"), error("torch's ZeRO-1")) < 1e-3


# %% [markdown]
# What does it cost on the wire? Let Φ be the bytes of all weights (or of all gradients: as many), n the number of ranks. A ring all-reduce sends 2 Φ (n − 1) / n from each rank (lesson 02), so we count in
# units of Φ (n − 1) / n. The flight recorder (lesson 11) has each collective with its size. What a rank must send for one of them, at the least and on average over the ranks:


# %%
def sent(calls, reduce_scatter=False, n=2):
    """Bytes that each of n ranks sends; say if all-reduces were meant as reduce-scatters."""
    times = {"all_reduce": 2 * (n - 1) / n, "all_gather": n - 1, "broadcast": (n - 1) / n}
    if reduce_scatter:
        times["all_reduce"] /= 2
    total = 0
    for call in calls:
        for size in re.findall(r"\[(.+?)\]", call.tensors):
            total += 4 * math.prod(map(int, size.split(","))) * times[call.name]
    return total


# %% tags=["nbval-ignore-output"]
once = 4 * PARAMETERS * (2 - 1) / 2  # Φ·(n − 1)/n, in bytes
for name in measured:
    calls = measured[name][2]
    kinds = {kind: sum(c.name == kind for c in calls) for kind in {c.name for c in calls}}
    print(f"{name:15} {sent(calls) / once:.2f} × Φ(n−1)/n   {kinds}")
assert abs(sent(measured["DDP"][2]) / once - 2) < 0.01
assert abs(sent(measured["ZeRO-1"][2], reduce_scatter=True) / once - 2) < 0.01
assert abs(sent(measured["torch's ZeRO-1"][2]) / once - 3) < 0.01

# %% [markdown]
# Our ZeRO-1 asked for a reduce-scatter, and the recorder says `all_reduce`: gloo has no reduce-scatter of its own and does all-reduces instead. NCCL has a real one, so that reduce-scatter and
# all-gather together send **2 Φ (n − 1) / n**, the same as DDP's all-reduce: a ring all-reduce *is* these two (lesson 02). ZeRO-1 costs nothing extra there. Torch's sits behind DDP's
# all-reduce and broadcasts the weights on top: 3 instead of 2.
#
# ## 3. FSDP: share out everything
#
# ZeRO-3, which torch calls **F**ully **S**harded **D**ata **P**arallel: each rank keeps its slice of weights, gradients *and* state. A layer's weights are gathered when it is
# its turn, and forgotten after it. `fully_shard` replaces each parameter by a `DTensor`, a tensor of which this rank has a shard; `full_tensor()` gathers it. A *mesh* says which ranks work together, here all in one row.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def all_ranks():
    return init_device_mesh("cpu", (dist.get_world_size(),))  # or "cuda"


def fsdp(model, forget=True):
    how = {"mesh": all_ranks(), "reshard_after_forward": forget}
    for block in model.blocks:  # each a group: gathered together
        fully_shard(block, **how)
    fully_shard(model, **how)  # what is in no block
    return plain(model)  # the optimizer comes after: it must see the shards


def fsdp_keeps(model):
    return fsdp(model, forget=False)


guess = predict.number(
    "DDP sends 2 × Φ(n−1)/n. FSDP gathers weights before forward and again before "
    "backward, and scatters gradients. What does it send?",
    start=2,
    low=1,
    high=6,
    unit="× Φ(n−1)/n",
)

# %% tags=["nbval-ignore-output"]
measured["FSDP"] = launch(train, fsdp).values[0]
calls = measured["FSDP"][2]
for call in calls:
    print(call)
asked = sent(calls, reduce_scatter=True) / once
kept_calls = launch(train, fsdp_keeps).values[0][2]
keeps = sent(kept_calls, reduce_scatter=True) / once
print(f"as asked for {asked:.2f} × Φ(n−1)/n, as gloo does it {sent(calls) / once:.2f}; "
      f"if gathered weights are kept until backward {keeps:.2f}")  # fmt: skip
assert abs(asked - 3) < 0.05 and abs(keeps - 2) < 0.05 and error("FSDP") < 1e-3
assert abs(measured["FSDP"][0].total / alone.total - 1 / 2) < 0.01
guess.compare(asked)

# %% [markdown]
# Half of everything on each of two ranks, for half as much traffic again as DDP: three all-gathers forward, three backward, three reduce-scatters. With `reshard_after_forward=False` the
# gathered weights stay until backward: 2 instead of 3, but for a while a rank holds all weights.
#
# > **Break it.** Make the optimizer *before* `fully_shard`, as in a script that was converted in a hurry.


# %%
def optimizer_first(model):
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    fully_shard(model, mesh=all_ranks())
    return model, optimizer, optimizer


def moves(way):
    """How far the weights move in a step, as norm."""
    model, optimizer, _ = way(new_model())
    before = weights_of(model)
    x, y = BATCHES[0]
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()
    return (weights_of(model) - before).norm().item()


# %% tags=["nbval-ignore-output"]
good, bad = (launch(moves, way).values[0] for way in (fsdp, optimizer_first))
print(f"optimizer made after fully_shard: moved by {good:.3f}; before: {bad:.3f}")
assert good > 0.1 and bad == 0

# %% [markdown]
# No error, and nothing is learned. **Cause.** `fully_shard` puts new parameters (`DTensor`) into the model; the optimizer holds the old ones, whose gradients stay None.
# **Fix.** First shard, then make the optimizer.
#
# ## 4. Tensor parallelism: split each layer
#
# Two linear layers with a ReLU between them. Split the first by its *outputs*, the second by its *inputs*: each rank computes with its half of the hidden units, and **one** all-reduce adds up the halves.


# %%
def split_by_hand():
    torch.manual_seed(0)
    up, down = nn.Linear(64, 256, bias=False), nn.Linear(256, 10, bias=False)
    x = data.digits()[0].tensors[0][:16]
    rank, n = dist.get_rank(), dist.get_world_size()
    mine = F.relu(x @ up.weight.chunk(n)[rank].T) @ down.weight.chunk(n, dim=1)[rank].T
    dist.all_reduce(mine)
    # The other way round: the first layer by its inputs, and ReLU before the sum.
    half = x.chunk(n, dim=1)[rank] @ up.weight.chunk(n, dim=1)[rank].T
    wrong = F.relu(half)
    dist.all_reduce(wrong)
    right = F.relu(up(x))
    return (mine - down(right)).abs().max().item(), (wrong - right).abs().max().item()


# %% tags=["nbval-ignore-output"]
right, wrong = launch(split_by_hand).values[0]
print(f"outputs, then inputs: off by {right:.0e}; inputs first: {wrong:.2f}")
assert right < 1e-5 and wrong > 0.1

# %% [markdown]
# `relu(a) + relu(b)` is not `relu(a + b)`: split by inputs, the sum has to come *before* the ReLU, in one more all-reduce. Split by outputs, the ReLU works on whole hidden units.
#
# In torch this is a plan by names. We split the MLP of each block; the attention would be split by its heads. Both ranks must see the **same** batch.

# %%
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def tensor_parallel(model):
    plan = {"mlp_input": ColwiseParallel(), "mlp_output": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, all_ranks(), plan)
    return plain(model)


# %%
guess = predict.choose(
    "What is all-reduced, and how often, in forward and backward of the two blocks?",
    ["weights, 2 ×", "activations, 2 ×", "activations, 4 ×", "gradients, 4 ×"],
)

# %% tags=["nbval-ignore-output"]
measured["tensor"] = launch(train, tensor_parallel, same_batch=True).values[0]
for call in measured["tensor"][2]:
    print(call)
assert error("tensor") < 1e-3
assert [str(c) for c in measured["tensor"][2]] == ["all_reduce(float32[16, 64, 64])"] * 4
guess.compare("activations, 4 ×")

# %% [markdown]
# `[16, 64, 64]` is batch × context × width: activations, once a block in forward and once in backward, and the forward *waits* for them. Their size grows with batch, context and
# width, and more ranks do not make it smaller. That is why tensor parallelism stays inside a node, where the links are fast.
#
# > **Break it.** Keep the data loader of DDP: each rank reads its own part of the batch.

# %% tags=["nbval-ignore-output"]
apart = launch(train, tensor_parallel, same_batch=False).values
off = ((apart[0][1] - wanted).abs().max() / wanted.abs().max()).item()
between = (apart[0][1] - apart[1][1]).abs().max().item()
print(f"weights off by {off:.0e}, and the ranks' copies of them differ by {between:.0e}")
assert off > 10 * error("tensor") and between > 0

# %% [markdown]
# Again no error. Halves of different samples are added up, and what is *not* split (embedding, norms, attention) gets another gradient on each rank. **Fix.** The sampler counts
# data-parallel groups, not ranks: all ranks of a tensor-parallel group read the same samples.
#
# ## 5. Pipeline: layers on different ranks
#
# Rank 0 has embedding and block 0, rank 1 block 1 and the output. Activations go right, their gradients go left. To keep both busy, the batch is cut into micro-batches.
# (The next three cells split the model and note the order of work, F and B, and the bytes sent; you may read on at the prediction. A micro-batch *waits* from its forward to its backward.)

# %%
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe


class First(nn.Module):
    def __init__(self, gpt):
        super().__init__()
        self.token, self.position, self.block = gpt.token, gpt.position, gpt.blocks[0]

    def forward(self, numbers):
        positions = torch.arange(numbers.shape[1])
        return self.block(self.token(numbers) + self.position(positions))


def stage_of(gpt, rank):
    return First(gpt) if rank == 0 else nn.Sequential(gpt.blocks[1], gpt.norm, gpt.head)


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


# %%
def watch(part, order):
    """Note F when a micro-batch goes through this stage, B when its gradient comes back."""

    def note(_, inputs, output):
        if output.requires_grad and output.device.type == "cpu":
            order.append("F")
            output.register_hook(lambda gradient: order.append("B"))

    part.register_forward_hook(note)


def counted(ask, sends):
    def ask_and_count(index):
        operations = ask(index)
        sends.extend(operation.tensor.nbytes for operation in operations)
        return operations

    return ask_and_count


def count_sends(stage, sends):
    """gloo's flight recorder has no point-to-point messages: ask the stage for them."""
    stage.get_fwd_send_ops = counted(stage.get_fwd_send_ops, sends)
    stage.get_bwd_send_ops = counted(stage.get_bwd_send_ops, sends)


# %%
def pipeline(schedule_class, micro_batches=8):
    """As `train`, with the order of work and the bytes sent in place of collectives."""
    rank, order, sends = dist.get_rank(), [], []
    part = stage_of(new_model(), rank)
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = schedule_class(stage, micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.Adam(part.parameters(), 1e-3)
    watch(part, order)
    count_sends(stage, sends)
    for x, y in BATCHES:
        order.clear(), sends.clear()
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
    return held(part, optimizer), weights_of(part), "".join(order), sum(sends)


# %%
guess = predict.number(
    "8 micro-batches, 2 stages. GPipe does all forwards, then all backwards. "
    "1F1B takes turns as soon as it can. "
    "How many micro-batches wait on rank 0 at most, under 1F1B?",
    start=8,
    low=1,
    high=8,
    unit="micro-batches",
)


# %% tags=["nbval-ignore-output"]
def most_waiting(order):
    """The most micro-batches that wait for their backward: their activations are held."""
    waits = [0]
    for work in order:
        waits.append(waits[-1] + (1 if work == "F" else -1))
    return max(waits)


ran = {}
for kind in (ScheduleGPipe, Schedule1F1B):
    ran[kind.__name__] = launch(pipeline, kind).values
    for rank, (_, _, order, _) in enumerate(ran[kind.__name__]):
        print(f"{kind.__name__:13} rank {rank}: {order}  at most {most_waiting(order)}")
assert [most_waiting(value[2]) for value in ran["ScheduleGPipe"]] == [8, 8]
assert [most_waiting(value[2]) for value in ran["Schedule1F1B"]] == [2, 1]
guess.compare(most_waiting(ran["Schedule1F1B"][0][2]))

# %% [markdown]
# F is a forward, B a backward. With a place for each unit of time and dots for waiting (drawn, not measured: 4 micro-batches, a backward as long as a forward):
#
# ```
# GPipe  rank 0: FFFF..BBBB      1F1B  rank 0: FF.BFBFB.B
#        rank 1: .FFFFBBBB.            rank 1: .FBFBFBFB.
# ```
#
# Both wait 2 places of 10, the *bubble*: with p stages and m micro-batches a stage idles for (p − 1) / (m + p − 1) of the time (Huang and others,
# 2019), so use many micro-batches. But GPipe holds the activations of all m at once, 1F1B of p at most. Is the result that of one process, and what was sent?


# %% tags=["nbval-ignore-output"]
stages = ran["Schedule1F1B"]
trained = new_model()
nn.utils.vector_to_parameters(wanted, trained.parameters())
for rank, (there, weights, _, bytes_sent) in enumerate(stages):
    off = (weights - weights_of(stage_of(trained, rank))).abs().max() / wanted.abs().max()
    print(f"rank {rank} holds {memory.in_bytes(there.total)}, "
          f"sends {memory.in_bytes(bytes_sent)} a step, weights off by {off:.0e}")  # fmt: skip
    assert off < 1e-3
    assert bytes_sent == 16 * 64 * 64 * 4  # batch × context × width, in float32
assert sum(value[0].total for value in stages) == alone.total

# %% [markdown]
# Rank 0 sends activations, rank 1 their gradients, once each at the cut. Here that is half as much as all weights, since the model is tiny. In a big one it is far less: a sequence of 2,048 tokens at width 12,288 is 50 MB in 16 bits, the weights of
# GPT-3 are 350 GB. And it does not grow with the depth of the model. So pipelines can cross slow links between nodes. The price is
# the bubble.
#
# ## 6. All of them, predicted and measured

# %% tags=["nbval-ignore-output"]
ledger = {name: value[0] for name, value in measured.items()}
ledger |= {f"pipeline, rank {rank}": value[0] for rank, value in enumerate(stages)}
plots.memory_ledger(ledger, limit=None, title="What one of two ranks holds, measured")

# %% tags=["nbval-ignore-output"]
for name, strategy_name in (("DDP", "ddp"), ("ZeRO-1", "zero1"), ("FSDP", "zero3")):
    rule = memory.training_memory(
        PARAMETERS, precision="fp32", optimizer="adam", strategy=strategy_name, gpus=2
    )
    print(f"{name:7} computed {memory.in_bytes(rule.total)}, "
          f"measured {memory.in_bytes(ledger[name].total)}")  # fmt: skip
    assert abs(ledger[name].total / rule.total - 1) < 0.01

# %% [markdown]
# The arithmetic of lesson 01 holds to a percent. Tensor parallelism saves less than half, since we split the MLPs alone; what is not split is on both ranks. The two stages of the pipeline are not quite equal.
# Not in the picture is what comes and goes: DDP's buckets, the layer that FSDP has gathered, and the activations, which are next.
#
# ## 7. Activations: compute them again
#
# *Activation checkpointing* keeps only the input of a block and runs its forward a second time in backward. With DDP, the older form of it fails in a way that many have met.


# %%
from torch.utils.checkpoint import checkpoint


class Recomputed(nn.Module):
    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def recomputed(reentrant):
    model = new_model()
    blocks = (Recomputed(block, reentrant) for block in model.blocks)
    model.blocks = nn.Sequential(*blocks)
    return model


# %%
def unused(reentrant):
    model = recomputed(reentrant)
    return plain(DistributedDataParallel(model, find_unused_parameters=True))


def shared(reentrant):
    model = recomputed(reentrant)
    model.blocks = nn.Sequential(model.blocks[0], model.blocks[0])  # one block, twice
    return plain(DistributedDataParallel(model))


# %% [markdown]
# > **Predict.** One script has `find_unused_parameters=True`, as scripts have that once had an unused branch; another uses one block twice. Do they train?

# %% tags=["nbval-ignore-output"]
from ddp_course import RankError

said = {}
for build in (unused, shared):
    try:
        launch(train, lambda _, build=build: build(reentrant=True))
    except RankError as caught:
        said[build.__name__] = str(caught)
        print(f"{build.__name__}: …{said[build.__name__][-195:]}")
assert all("marked as ready twice" in text for text in said.values()) and len(said) == 2

# %% [markdown]
# **Cause.** With `use_reentrant=True` the block runs in forward without a graph, and in backward again, with one. DDP, which looks through the forward's graph for unused parameters, does not find the
# block's and marks them as ready; in backward they report a second time. And a block that was used twice runs backward twice, each time for itself, where a usual graph adds up first.
# **Fix.** `use_reentrant=False`, which keeps the graph. (DDP then warns that nothing is unused: right, the option should go.)

# %% tags=["nbval-ignore-output"]
launch(train, lambda _: shared(reentrant=False))
measured["recomputed"] = launch(train, lambda _: unused(reentrant=False)).values[0]
print(f"both run; weights off by {error('recomputed'):.0e}")
assert error("recomputed") < 1e-3


# %% tags=["nbval-ignore-output"]
def activations_of(model):
    x, y = BATCHES[0]
    optimizer = torch.optim.Adam(model.parameters())
    return memory.measure(model, optimizer, lambda m: loss_of(m(x), y)).activations


inputs = 2 * 16 * 64 * 64 * 4  # of the two blocks: kept, but not as saved tensors
usual, less = activations_of(new_model()), activations_of(recomputed(False)) + inputs
print(f"activations: {memory.in_bytes(usual)}, recomputed {memory.in_bytes(less)}")
assert less < usual / 2

# %% [markdown]
# The price is one more forward, about a third more compute. With large models this is the rule, and the chooser below counts memory with it.
#
# ## 8. Choose
#
# The parts again, and what each needs. From here on Φ is the *number* of parameters, as in the papers, and 16 B·Φ are bytes:
#
# | | splits | sends | needs |
# | --- | --- | --- | --- |
# | DDP | the batch | 2 Φ (n−1)/n a step | everything fits on one GPU |
# | ZeRO-1 | + optimizer state | the same | weights and gradients fit |
# | FSDP | + gradients, weights | 3 Φ (n−1)/n a step | enough tokens a GPU to hide the traffic |
# | tensor | each layer | activations, several times a layer | fast links: inside a node |
# | pipeline | the layers | activations at each cut | many micro-batches |
#
# `strategy.choose` takes the first that works, from top to bottom. It shows each step. Unless told otherwise it takes 80 GB a GPU, 90 % of it for tensors, 50 GB/s between GPUs and 400 TFLOP/s; 6·Φ·tokens is the
# arithmetic of a forward and a backward (lesson 01; a recomputed forward is left out).

# %%
from ddp_course import strategy

print(strategy.choose(parameters=7e9, layers=32, width=4096, heads=32, context=4096,
                      global_batch=1024, gpus=8))  # fmt: skip

# %%
print(strategy.choose(parameters=70e9, layers=80, width=8192, heads=64, context=4096,
                      global_batch=1024, gpus=64))  # fmt: skip

# %% [markdown]
# Φ cancels in the last test: not the size of the model decides whether FSDP's traffic hides, but the number of *tokens* that each GPU has in a step. With more GPUs and the same batch it does not, and tensor
# parallelism comes in:

# %%
print(strategy.choose(parameters=70e9, layers=80, width=8192, heads=64, context=4096,
                      global_batch=1024, gpus=1024))  # fmt: skip

# %% [markdown]
# ### Would it have chosen what was really done?
#
# The ten models of the Megatron-LM paper (Narayanan and others, 2021, table 1), 1.7 to 1,008 billion parameters, up to 3,072 A100s, no ZeRO, and 20 bytes a parameter, as Megatron's own documentation counts:

# %%
from ddp_course.published import LLAMA, MEGATRON

agree = []
for run in MEGATRON:
    found = strategy.choose(**run.given)
    agree.append(found.model_parallel == run.model_parallel)
    print(f"{run.name:20} published {run.tensor} × {run.pipeline:<2}  "
          f"chosen {found.tensor} × {found.pipeline:<2} {'' if agree[-1] else ' ✗'}")  # fmt: skip
print(f"{sum(agree)} of {len(agree)} agree (tensor × pipeline)")

# %% tags=["nbval-ignore-output"]
plots.strategy_choice(MEGATRON, room=0.9 * 80e9, bytes_each=20)

# %% [markdown]
# The dashed line is bytes of a parameter × parameters / room on a GPU. Round it up to a number that divides layers, GPUs and batch, and you have the circles.
#
# How much of the agreement is luck? Two assumptions are ours: the bytes of a parameter (Megatron's own documentation says 20 for fp16 without a distributed optimizer; the ZeRO paper counts 16), and the share of the memory that
# is left for tensors.

# %%
for bytes_each in (strategy.ZERO_PAPER, strategy.MEGATRON_FP16):
    for usable in (0.8, 0.9, 1.0):
        changed = {"bytes_each": bytes_each, "usable": usable}
        ratios = [
            run.model_parallel / strategy.choose(**run.given | changed).model_parallel
            for run in MEGATRON
        ]
        print(f"{sum(bytes_each)} B, {usable:.0%} usable: {ratios.count(1)} of 10 agree, "
              f"at worst the paper used {max(ratios):.1f} times as many GPUs a copy")  # fmt: skip
        assert min(ratios) >= 1 and max(ratios) <= 2.5

# %% [markdown]
# That tensor comes before pipeline, and 8 at most, is built into the chooser, and fits all ten rows. What comes *out* is the number of GPUs for a copy: right within a factor of 2.3 under all six assumptions. The paper never used *fewer* GPUs for a copy than the
# arithmetic asks for: authors leave room, and balance other things.
#
# Llama 3 with 405 billion parameters (Grattafiori and others, 2024, table 4), sizes in the order tensor × context × pipeline × data (*context*: GPUs that share the positions of one sequence, lesson 01):

# %%
for run in LLAMA:
    found = strategy.choose(**run.given)
    published = f"{run.tensor} × {run.context} × {run.pipeline} × {run.data}"
    chosen = f"{found.tensor} × {found.context} × {found.pipeline} × {found.data}"
    print(f"{run.name[15:]}: published {published}, chosen {chosen}")
    assert (found.tensor, found.context) == (run.tensor, run.context)
    assert run.pipeline == 2 * found.pipeline

# %% [markdown]
# Tensor 8 and context 16 are found, the latter from the batch alone: 128 long sequences are too few for all the copies that 16,384 GPUs could hold, so GPUs share sequences. The pipeline is **half** of what Meta took, for memory that the chooser saves by recomputing
# activations. The paper (section 3.3) trains without it, with measures of its own for the memory of each stage; by the chooser's formula nothing would fit then:

# %%
try:
    strategy.choose(**LLAMA[1].given, recompute="selective")
except ValueError as caught:
    print(str(caught).splitlines()[-2])
    print(str(caught).splitlines()[-1])

# %% [markdown]
# > **Try it.** Your own model, your own cluster. When does `usable`, `bandwidth` or the batch change the answer?
#
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("13_beyond_ddp")

# %% [markdown]
# ## Exercise
#
# [13_zero1_optimizer](../exercises/13_zero1_optimizer.ipynb): write ZeRO-1 for any model, equal to Adam, with a share of the state on each rank.
#
# ## How this looks on several GPUs and nodes
#
# The calls are the same, with the backend nccl and a device mesh of two dimensions: `init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("data", "tensor"))`, tensor inside a node, FSDP or pipeline across. NCCL has a real
# reduce-scatter, and overlaps FSDP's gathers with computing, on a stream of its own. All of this lesson runs on gloo; what gloo lacks is a reduce-scatter of its own (section 2), and its recorder
# has no point-to-point messages (section 5). What this lesson could not measure on CPU ranks: time. Expert parallelism (for mixtures of experts) and
# context parallelism were not run; they come into play with models and sequences that no laptop holds.
#
# ## Where to read more
#
# * Rajbhandari, Rasley, Ruwase, He: *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models* (2020).
# * Shoeybi and others: *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism* (2019): tensor parallelism.
# * Huang and others: *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism* (2019).
# * Narayanan and others: *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM* (2021).
# * Zhao and others: *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (2023).
# * Grattafiori and others: *The Llama 3 Herd of Models* (2024), section 3.3.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
for name, held_there in ledger.items():
    share = held_there.total / alone.total
    there = memory.in_bytes(held_there.total)
    print(f"{name:16} {there:>8} a rank, {share:.0%} of one process")
print(f"sent, in Φ(n−1)/n: DDP {sent(measured['DDP'][2]) / once:.2f}, FSDP {asked:.2f}")
print(f"micro-batches that wait on rank 0: GPipe {most_waiting(ran['ScheduleGPipe'][0][2])}, "
      f"1F1B {most_waiting(stages[0][2])}")  # fmt: skip
