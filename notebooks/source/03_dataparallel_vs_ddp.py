# %% [markdown]
# # 03 · DataParallel or DistributedDataParallel
#
# **What you will do.** Take PyTorch's older wrapper, `DataParallel`, apart: read its source, do its four steps by hand, and measure what
# each of them costs beside `DistributedDataParallel` (DDP).
#
# **What you will learn.** Why one process with threads is not enough; what is copied in every step, and through whose wire; why
# device 0 is full first; what gets lost. At the end, a table with evidence for each row.
#
# **What you need.** Lessons 00 and 02. About 15 minutes. No GPU is needed; with two of them, section 6 runs the real thing.
#
# ---
# **The question.** `DataParallel(model)` is one line: no processes, no ranks, no launcher. Why does PyTorch's own
# documentation send you to DDP, even on a single machine?

# %% [markdown]
# ## 1. On a CPU, DataParallel does nothing
#
# Its idea: cut the batch into parts, one for each GPU, and let a thread for each GPU do its part. Let us watch: which thread runs
# the forward, and how much of the batch does it see?

# %%
import threading

import torch
import torch.distributed as dist
from torch import nn

from ddp_course import launch, show


class Watched(nn.Linear):
    def forward(self, x):
        print(f"forward of {len(x)} samples in {threading.current_thread().name}")
        return super().forward(x)


def wrapped():
    model = Watched(4, 2)
    parallel = nn.DataParallel(model)
    output = parallel(torch.ones(8, 4))
    print("devices:", parallel.device_ids)
    return torch.equal(output, model(torch.ones(8, 4))), parallel.device_ids


# %% tags=["nbval-ignore-output"]
gpus = torch.cuda.device_count()
if gpus == 0:
    same, devices = wrapped()
    assert same and devices == []
else:
    print("this machine has GPUs: what you read above is from one without")

# %% [markdown]
# Without GPUs there are no devices to spread over: one forward, of the whole batch, in the main thread. It just passes the call on. A
# timing of `DataParallel` on a CPU is therefore the timing of a plain model. What it *would* do stands in its source:

# %%
show.source(nn.DataParallel.forward)

# %% [markdown]
# Read the last lines: **scatter** the inputs, **replicate** the model, **parallel_apply** (threads), **gather** the outputs. In
# *every* forward.

# %% [markdown]
# ## 2. The four steps by hand
#
# The same on a CPU, where "device" is only a name: real threads, real copies. `wire` counts the bytes that device 0 sends to the
# others, and gets from them.


# %%
import copy

import torch.nn.functional as F


def size_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


# %%
def data_parallel_step(model, x, y, devices):
    """Forward and backward as DataParallel does it; return (replicas, output, wire)."""
    parts = x.chunk(devices)  # scatter
    replicas = [copy.deepcopy(model) for _ in range(devices)]  # replicate
    outputs = [None] * devices

    def forward(device):
        outputs[device] = replicas[device](parts[device])

    threads = [threading.Thread(target=forward, args=(k,)) for k in range(devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output = torch.cat(outputs)  # gather, on device 0
    F.cross_entropy(output, y).backward()  # the loss is computed there as well
    everywhere = [r.parameters() for r in replicas]
    for weight, *copies in zip(model.parameters(), *everywhere, strict=True):
        weight.grad = sum(one.grad for one in copies)  # back to device 0
    sent = (devices - 1) * size_of(model.parameters())
    wire = {"weights out": sent, "inputs out": size_of(parts[1:])}
    wire |= {"outputs in": size_of(outputs[1:]), "gradients in": sent}
    return replicas, output, wire


# %% [markdown]
# Is it right? Its gradients, and those of DDP on two ranks, against those of one plain process on the same batch:


# %%
from torch.nn.parallel import DistributedDataParallel

from ddp_course import models


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 64, generator=generator)
    return x, torch.randint(10, (32,), generator=generator)


# %%
def network():
    torch.manual_seed(0)
    return models.MLP(width=256).double()


def gradients_of(model):
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def distributed_step(x, y):
    model, rank, world_size = network(), dist.get_rank(), dist.get_world_size()
    parallel = DistributedDataParallel(model)
    mine = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    F.cross_entropy(parallel(mine[0]), mine[1]).backward()
    return gradients_of(model)


# %% tags=["nbval-ignore-output"]
x, y = batch()
x = x.double()
plain, threaded = network(), network()
F.cross_entropy(plain(x), y).backward()
data_parallel_step(threaded, x, y, devices=2)
gaps = {"threads": (gradients_of(threaded) - gradients_of(plain)).abs().max().item()}
print("the first DDP in a notebook loads more of PyTorch: some seconds …")
for gradient in launch(distributed_step, x, y, backend="gloo").values:
    gaps["ranks"] = (gradient - gradients_of(plain)).abs().max().item()
print(gaps)
assert max(gaps.values()) < 1e-12  # rounding of float64

# %% [markdown]
# Both are right, to rounding. So the difference is not in *what* they compute. It is in what it costs.
#
# One thing to know before the exercise: here both parts were equally large. DDP averages the ranks' gradients, so with unequal parts it gives
# the mean of the parts' means; `DataParallel` has one loss, over all outputs. And parts are not all alike:

# %%
whole = torch.tensor([1.0, 2.0, 3.0, 10.0])
parts = whole.tensor_split(3)
print("three parts:", [part.tolist() for part in parts])
print("chunk makes", len(whole.chunk(3)), "of them; tensor_split makes", len(parts))
of_means = torch.stack([part.mean() for part in parts]).mean()
print(f"mean of the means {of_means:.3f}, mean of all {whole.mean():.3f}")
assert len(whole.chunk(3)) == 2 and len(parts) == 3 and of_means != whole.mean()

# %% [markdown]
# ## 3. Threads take turns
#
# In CPython, the usual Python, one thread at a time executes Python code: it must hold the **global interpreter lock**, the GIL. Two
# ranks are two processes, each with a GIL of its own.
#
# > **Predict.** Two threads run pure Python for a tenth of a second, and so do two ranks. For what share of the time do both run at
# > once?

# %% tags=["nbval-ignore-output"]
from ddp_course import predict

guess_threads = predict.number(
    "Two threads run Python at once for … of the time", 50, "%", low=0, high=100
)
guess_ranks = predict.number(
    "Two ranks run Python at once for … of the time", 50, "%", low=0, high=100
)

# %%
import itertools
import time


def count(log, seconds=0.1):
    """Run Python, and note the time every few microseconds."""
    end = time.perf_counter() + seconds
    while (now := time.perf_counter()) < end:
        log.append(now)
        sum(range(500))


def runs(log, pause=5e-4):
    """The stretches (start, end) of a log without a longer pause."""
    cuts = [k for k in range(1, len(log)) if log[k] - log[k - 1] > pause]
    ends = itertools.pairwise([0, *cuts, len(log)])
    return [(log[first], log[last - 1]) for first, last in ends]


# %%
def two_threads():
    logs = [], []
    threads = [threading.Thread(target=count, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [runs(log) for log in logs]


def one_rank():
    dist.barrier()
    count(log := [])
    return runs(log)


# %% [markdown]
# Other work on this machine gets in the way of two ranks, so we try a few times and keep the best.

# %% tags=["nbval-ignore-output"]
import sys

from ddp_course import plots
from ddp_course.plots.grids import overlap
from ddp_course.process_group import cores

threads = launch(two_threads, nproc=1).values[0]
tries = []
best = 0
while best < 0.4 and len(tries) < (10 if best > 0.01 else 60):
    tries.append(launch(one_rank).values)
    print(f"two ranks, try {len(tries)}: both ran {overlap(tries[-1]):.0%} of the time")
    best = max(best, overlap(tries[-1]))
ranks = max(tries, key=overlap)

# %% tags=["nbval-ignore-output"]
both = {
    "two threads": {f"thread {k}": spans for k, spans in enumerate(threads)},
    "two ranks": {f"rank {k}": spans for k, spans in enumerate(ranks)},
}
# some builds of Python have no GIL
has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
if has_gil:
    assert overlap(threads) < 0.01
if has_gil and cores() >= 2:
    assert overlap(ranks) > overlap(threads)
shares = f"threads {overlap(threads):.0%}, ranks {overlap(ranks):.0%} of the time"
plots.turns(both, f"Both ran Python at once: {shares}")

# %% tags=["nbval-ignore-output"]
predict.compare(
    {
        "two threads": (guess_threads, 100 * overlap(threads)),
        "two ranks": (guess_ranks, 100 * overlap(ranks)),
    },
    unit="% of the time that both ran",
    title="Threads never run Python at the same time",
)

# %% [markdown]
# The threads take turns: never do two run. The ranks run at the same time, as far as this machine has cores to spare.
#
# It is not all Python, though. PyTorch lets go of the GIL while it computes inside of an operation, and only the Python around it has to
# take turns. So it should depend on the model: **many small operations** are mostly Python, **few large ones** hardly. (On a GPU it is
# Python that *starts* the operations: the faster the GPU, the larger Python's part.)
#
# Measure it: forward and backward of two replicas, one after the other, in two threads, and on two ranks. Each thread and each rank
# computes with one core.


# %%
class ManySmall(nn.Module):
    """Forty layers so small that Python takes longer than the arithmetic: x [N, 16]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(40))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) + 0.1 * x
        return x


def few_large():
    return nn.Sequential(*[nn.Linear(768, 768) for _ in range(3)])


# %%
def steps(model, x, count=4):
    torch.set_num_threads(1)  # each thread has its own setting
    for _ in range(count):
        model(x).sum().backward()


def seconds(work, *arguments):
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


# %%
def in_threads(replicas, x):
    threads = [threading.Thread(target=steps, args=(replica, x)) for replica in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_after_the_other(replicas, x):
    for replica in replicas:
        steps(replica, x)


def together(replica, x):
    steps(replica, x)
    dist.barrier()  # until the other rank is done as well


# %%
def three_ways(build, x, rounds=12):
    """The shortest times of the three ways, in turns; rank 0 alone does the first two."""
    replicas, times = [build(), build()], []
    for number in range(rounds):
        alone = [0.0, 0.0]
        if dist.get_rank() == 0:
            ways = (one_after_the_other, in_threads)
            alone = [seconds(way, replicas, x) for way in ways]
            if number % 4 == 3:
                print("round", number + 1, "of", rounds)
        dist.barrier()  # where rank 1 has waited
        times.append([*alone, seconds(together, replicas[0], x)])
    return [min(way) for way in zip(*times[1:], strict=True)]  # the first round warms up


# %% [markdown]
# > **Predict.** Two workers could at best be twice as fast as one after the other. How many times as fast are two *threads* with many
# > small operations? And two *ranks*?

# %% tags=["nbval-ignore-output"]
guess_threads = predict.number(
    "Two threads, many small operations: … times as fast", 1.8, "times", low=0, high=3
)
guess_ranks = predict.number(
    "Two ranks, many small operations: … times as fast", 1.8, "times", low=0, high=3
)

# %% tags=["nbval-ignore-output"]
speed = {}
cases = {
    "many small": (ManySmall, torch.ones(8, 16)),
    "few large": (few_large, torch.ones(64, 768)),
}
for name, (build, inputs) in cases.items():
    print(f"{name} operations:")
    times = launch(three_ways, build, inputs, backend="gloo").values[0]
    speed[name] = times[0] / times[1], times[0] / times[2]
    print("two threads {:.2f}, two ranks {:.2f} times as fast".format(*speed[name]))

predict.compare(
    {
        "two threads": (guess_threads, speed["many small"][0]),
        "two ranks": (guess_ranks, speed["many small"][1]),
    },
    unit="times as fast, with many small operations",
    title="What two workers gain with many small operations",
)

# %% [markdown]
# Compare the two numbers of each line: 1 is no gain, 2 the most there can be. With many small operations the threads queue for the GIL,
# the ranks do not. With few large operations the threads have less to queue for. (Nothing is asserted here: these are timings, and a
# machine that is busy with other things, or has one core, gives others. What is asserted is the picture above.)

# %% [markdown]
# ## 4. What crosses the wire, and whose wire
#
# DDP copies the weights once, at the start. To see it, give each rank other weights before it is wrapped, and change them once more
# behind DDP's back:


# %%
def weights_over_time():
    torch.manual_seed(dist.get_rank())  # every rank begins with weights of its own
    model = nn.Linear(4, 2)
    parallel = DistributedDataParallel(model)
    start = model.weight.sum().item()
    with torch.no_grad():
        model.weight += dist.get_rank()
    parallel(torch.ones(8, 4)).sum().backward()
    return start, model.weight.sum().item()


first, second = launch(weights_over_time, backend="gloo").values
assert first[0] == second[0]  # copied when wrapped
assert abs(second[1] - first[1]) > 7  # not again: 8 weights still differ by 1
print("wrapped: equal weights; changed afterwards: they stay different")

# %% [markdown]
# `DataParallel` copies the weights in every step, and everything goes through device 0.
#
# > **Predict.** Eight GPUs. How many models' worth of bytes does device 0 send and receive in one step of `DataParallel`? And each rank
# > under DDP, with a ring?

# %% tags=["nbval-ignore-output"]
guess_dp = predict.number("DataParallel, device 0 of 8", 2, "models", low=0, high=20)
guess_ddp = predict.number("DDP, each of 8 ranks", 2, "models", low=0, high=20)


# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def bytes_per_step(steps):
    """The bytes that DDP all-reduces in one step, counted in a communication hook."""
    sent = []

    def counted(group, bucket):
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(group, bucket)

    parallel = DistributedDataParallel(models.MLP(width=256))
    parallel.register_comm_hook(dist.group.WORLD, counted)
    for _ in range(steps):
        parallel(torch.ones(4, 64)).sum().backward()
    return sum(sent) / steps


model = models.MLP(width=256)
weights = size_of(model.parameters())
reduced = launch(bytes_per_step, 3, backend="gloo").values
print(f"the model has {weights:,} bytes; DDP all-reduces {reduced[0]:,.0f} in a step")
assert reduced == [weights, weights]

# %%
x, y = batch()
for devices in (2, 4, 8):
    wire = data_parallel_step(model, x, y, devices)[2]
    through_0 = sum(wire.values()) / weights
    ring = 2 * 2 * (devices - 1) / devices  # sent and received, lesson 02
    print(f"{devices} devices: device 0 {through_0:.2f} models, a DDP rank {ring:.2f}")
    assert 2 * (devices - 1) <= through_0 < 2 * (devices - 1) + 1
    assert ring < 4

# %% tags=["nbval-ignore-output"]
predict.compare(
    {
        "DataParallel, device 0": (guess_dp, through_0),
        "DDP, each rank": (guess_ddp, ring),
    },
    unit="models in and out, per step, 8 devices",
    title="Device 0 carries more with every device, a rank of a ring hardly",
    source="counted",
)

# %% [markdown]
# It is 2 (N − 1) models for device 0, and inputs and outputs besides: the star of lesson 02. A ring needs less than 4 in and out,
# however many ranks there are. (Counted: the bytes of section 2's copies, and lesson 02's formula for what DDP all-reduces.) And DDP's
# bytes travel while backward still computes (lesson 04); `DataParallel`'s weights come before the forward.

# %% [markdown]
# ## 5. Device 0 is full first
#
# Where is what at the end of the step? Count it, for a small language model with Adam, whose state is twice the size of the weights.


# %%
def held(model, optimizer, replicas, output, x):
    """The bytes that each device holds at the end of a step of `data_parallel_step`."""

    def with_gradients(module):
        return size_of(t for weight in module.parameters() for t in (weight, weight.grad))

    state = [t for part in optimizer.state.values() for t in part.values()]
    devices = len(replicas)
    others = [with_gradients(r) + size_of([output, x]) // devices for r in replicas[1:]]
    return [with_gradients(model) + size_of([*state, output, x]), *others]


# %%
print("the first optimizer in a notebook loads more of PyTorch: some seconds …")
gpt = models.build("gpt", vocabulary=512)
optimizer = torch.optim.Adam(gpt.parameters())
tokens = torch.randint(512, (32, 64))
output_of = nn.Sequential(gpt, nn.Flatten(0, 1))  # every position predicts one token
replicas, output, _ = data_parallel_step(output_of, tokens, tokens.flatten(), devices=4)
optimizer.step()
memory = held(output_of, optimizer, replicas, output, tokens)
print("MB on each device:", *[f"{bytes_held / 1e6:.1f}" for bytes_held in memory])
assert memory[0] > 2 * memory[1] and memory[1] == memory[3]

# %% [markdown]
# Device 0 holds the model, its gradients, the optimizer's state, the whole batch and the outputs of *all* devices. The others hold a
# replica with its gradients and their own part of batch and outputs. (Activations are left out: they are the same everywhere.) So device
# 0 limits the size of the batch, while the others have room.
#
# For GPT-2, with its vocabulary of 50,257 and 1,024 positions, the outputs alone:

# %%
per_device = 8 * 1024 * 50257 * 4 / 1e9  # 8 texts on each device, fp32
print(f"{per_device:.1f} GB of outputs a device")
print(f"{8 * per_device:.1f} GB gathered on device 0 of 8")
assert 8 * per_device > 13

# %% [markdown]
# Under DDP the outputs stay where they are, and each rank computes its own loss and takes its own step. All ranks hold the same. (Not
# counted: DDP's buckets hold the gradients once more, unless `gradient_as_bucket_view=True` lets them share memory.)


# %%
def bytes_on_a_rank():
    parallel = DistributedDataParallel(models.build("gpt", vocabulary=512))
    optimizer = torch.optim.Adam(parallel.parameters())
    mine = torch.randint(512, (32 // dist.get_world_size(), 64))
    output = parallel(mine).flatten(0, 1)
    F.cross_entropy(output, mine.flatten()).backward()
    optimizer.step()
    state = [t for part in optimizer.state.values() for t in part.values()]
    kept = [t for w in parallel.parameters() for t in (w, w.grad)]
    return size_of([*kept, *state, output, mine])


on_ranks = launch(bytes_on_a_rank, nproc=4, backend="gloo").values
print("MB on each rank:", *[f"{bytes_held / 1e6:.1f}" for bytes_held in on_ranks])
assert len(set(on_ranks)) == 1 and on_ranks[0] < memory[0]

# %% [markdown]
# ### Break it: a counter that stays at zero
#
# A model counts its own forward passes, to warm something up, say.
#
# > **Predict.** After three steps, what does the counter say with replicas, and what on each rank of DDP?


# %%
class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def count_under_ddp():
    model = Counting(4, 2)
    parallel = DistributedDataParallel(model)
    for _ in range(3):
        parallel(torch.ones(8, 4)).sum().backward()
    return model.calls


model = Counting(4, 2)
for _ in range(3):
    data_parallel_step(
        model, torch.ones(8, 4), torch.zeros(8, dtype=torch.long), devices=2
    )
counted = launch(count_under_ddp, backend="gloo").values
print("with replicas:", model.calls, "and on the ranks of DDP:", counted)
assert model.calls == 0 and counted == [3, 3]

# %% [markdown]
# **Cause.** Each forward ran in a replica that was thrown away after the step, with what it had counted. PyTorch's documentation warns of
# the same for `DataParallel`. **Fix.** DDP: a rank's model is an ordinary object that lives on.

# %% [markdown]
# ## 6. The real one, where there are GPUs
#
# Everything so far ran on a CPU: the counts hold on any device, the timings say nothing of GPUs. With two GPUs, the next cells run the
# real `DataParallel` and DDP on them.


# %%
def time_and_memory(model, device, samples, count=20):
    """Milliseconds a step, and the largest memory on each GPU in MB."""
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(samples, 2048, device=device)
    for step in range(count + 5):
        if step == 5:  # the first ones warm up
            torch.cuda.synchronize(device)
            start = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    used = [
        torch.cuda.max_memory_allocated(k) / 1e6 for k in range(torch.cuda.device_count())
    ]
    return 1e3 * seconds / count, used


# %%
def layers(device):
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).to(device)


def with_data_parallel():
    model = nn.DataParallel(layers("cuda:0"), device_ids=[0, 1])
    return time_and_memory(model, torch.device("cuda:0"), samples=1024)


def with_ddp():
    device = torch.device("cuda", torch.cuda.current_device())
    model = DistributedDataParallel(layers(device), device_ids=[device.index])
    return time_and_memory(model, device, samples=512)


# %% tags=["nbval-ignore-output"]
if gpus >= 2:
    print(
        "DataParallel: ms a step, MB on each GPU",
        launch(with_data_parallel, nproc=1).values[0],
    )
    for rank, measured in enumerate(launch(with_ddp, nproc=2).values):
        print(f"DDP, rank {rank}: ms a step, MB on each GPU", measured)
else:
    print(f"not run: DataParallel needs two GPUs, and this machine has {gpus}")

# %% [markdown]
# ## 7. Break it: more ranks than GPUs
#
# DDP wants a process *per device*. What if you start four on a machine with fewer? NCCL refuses two ranks on one GPU ("Duplicate
# GPU detected"), but only in the first collective, after everything else has been loaded. `launch` refuses before anything
# starts:

# %% tags=["nbval-ignore-output"]
too_many = max(2, gpus + 1)
try:
    launch(dist.get_rank, nproc=too_many, backend="nccl")
    refusal = ""
except ValueError as error:
    refusal = str(error)
    print(refusal)

assert "needs one GPU for each rank" in refusal

# %% [markdown]
# NCCL's own words, if there is a GPU for two ranks to quarrel over. (With gloo they can share it, which is how this course
# runs on a machine with a single GPU.)

# %% tags=["nbval-ignore-output"]
from ddp_course import RankError


def share_one_gpu():
    group = dist.new_group(backend="nccl")
    dist.all_reduce(torch.ones(1, device="cuda:0"), group=group)


if gpus >= 1:
    try:
        launch(share_one_gpu, nproc=2, backend="gloo", timeout=60)
        said = ""
    except RankError as error:
        said = str(error)
        print(said)
    assert "Duplicate GPU" in said
else:
    print("not run: this machine has no GPU")

# %% [markdown]
# **Fix:** one rank per GPU, and let the machine say how many: `launch(…, nproc=torch.cuda.device_count())`, or
# `torchrun --nproc-per-node gpu`.

# %% [markdown]
# ## 8. The table
#
# | | DataParallel | DistributedDataParallel | seen in |
# | --- | --- | --- | --- |
# | who computes | threads of one process | one process for each device | 1, 2 |
# | gradients | equal to one process | equal to one process | 2 |
# | Python code | takes turns (GIL) | runs at the same time | 3 |
# | the model is copied | in every forward | once, at the start | 1, 2 |
# | wire, per step | 2 (N − 1) models, all through device 0 | less than 4 models in and out of each rank | 4 |
# | loss and optimizer | on device 0 | on every rank, for its own part | 2, 5 |
# | memory | device 0 full, others not | the same on all ranks | 5 |
# | what the model notes in forward | lost with the replica | stays | 5 |
# | machines | one | any number | – |
# | needs | one line | a launcher, a sampler for each rank | 06 |
#
# The last row is the only one in which `DataParallel` wins, and lesson 06 shows how small that cost is.

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("03_dataparallel_vs_ddp")

# %% [markdown]
# ## Exercise
#
# [03_dp_vs_ddp](../exercises/03_dp_vs_ddp.ipynb): turn a training step with `DataParallel` into one with DDP, which gives the same gradients and
# the same loss, also when the batch does not divide by the number of ranks.
#
# ## How this looks on several GPUs and nodes
#
# `DataParallel` ends at the edge of a machine: threads cannot leave their process. DDP does not know the edge: ranks on other machines are
# ranks like all others, only with a slower wire between. On one machine with eight GPUs, `DataParallel` has one Python that starts
# the operations of all of them in turns; DDP has eight.
#
# ## Where to read more
#
# *S. Li and others*, PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020. The PyTorch documentation on
# `DataParallel` (its warnings) and `DistributedDataParallel`. Python's documentation on the global interpreter lock.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- gradients of threads and ranks: {max(gaps.values()):.0e} from one process's
- both run Python at once: {shares}""")
for name, (by_threads, by_ranks) in speed.items():
    print(f"- {name} operations: two threads {by_threads:.2f} times as fast as one after")
    print(f"  the other, two ranks {by_ranks:.2f} times")
print(f"""- 8 devices: {through_0:.1f} models through device 0, {ring:.1f} for a rank of DDP
- device 0 holds {memory[0] / memory[1]:.1f} times what the others hold;
  under DDP all hold the same
- a counter in the model: {model.calls} with replicas, {counted[0]} under DDP""")
