# %% [markdown]
# # 10 · Performance
#
# **What you will do.** Time a step honestly; measure where a second rank pays and where it does not; predict a step from the network's α and β;
# dial the network down and win the time back; read a trace of each rank, and remove three slow-downs that somebody has planted.
#
# **What you will learn.** What a number about speed has to contain, what limits scaling, and which cure helps against which illness.
#
# **What you need.** Lessons 02, 04 and 07. About 30 minutes.
#
# ---
# **The question.** You pay for twice the hardware. What do you get, how do you know, and where did the rest go?

# %%
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_course import data, launch, models, plots, predict, scaling, show, trace
from ddp_course.collectives import fit, seconds_of
from ddp_course.ddp import make_buckets
from ddp_course.network import SlowLink, bf16_compress_wrapper, gbit, mbit, power_sgd


def ms(seconds):
    return f"{1000 * seconds:.3g} ms"


# %% [markdown]
# ## 1. Three clocks that lie
#
# **First.** Somebody times an all-reduce. It is given a tensor of 64 MB, and the clock is read before and after the call:


# %%
def timed(repeats=5):
    """Seconds until the call has returned, and until the sum is there."""
    x, found = torch.empty(2**24), []
    for _ in range(repeats):
        x.fill_(1)
        dist.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(x, async_op=True)
        returned = time.perf_counter() - start
        work.wait()
        found.append((returned, time.perf_counter() - start))
    return [min(column) for column in zip(*found, strict=True)]


lie = predict.number(
    "The sum is there after 100 %. After how many percent has the call returned?",
    start=80, unit="%", low=0, high=100,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
returned, arrived = launch(timed).values[0]
print(f"the call returned after {ms(returned)}, the sum was there after {ms(arrived)}")
assert 3 * returned < arrived
lie.compare(100 * returned / arrived, title="The call only asks for the work")

# %% [markdown]
# **Cause.** The call only *asks* for the work. On a GPU that is so for nearly *every* operation: Python asks, and the GPU comes to it later. Read
# the clock without `torch.cuda.synchronize()`, and you have timed the asking. **Fix.** Wait for the device, then read.
#
# **Second.** The same step, twelve times:


# %%
def twelve_steps():
    model = DistributedDataParallel(models.MLP(width=64))
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    times = []
    for _ in range(12):
        start = time.perf_counter()
        F.cross_entropy(model(x), y).backward()
        times.append(time.perf_counter() - start)
    return times


# %% tags=["nbval-ignore-output"]
first_step, *others = launch(twelve_steps).values[0]
usual, average = statistics.median(others), statistics.mean([first_step, *others])
print(
    f"first step {ms(first_step)}, median of the others {ms(usual)}, mean of all {ms(average)}"
)
assert first_step > 1.3 * usual and average > usual

# %% [markdown]
# **Cause.** The first steps do what is done once: threads start, memory is asked for, DDP orders its buckets. And a single slow step, in which
# the machine did something else, drags a mean along. **Fix.** Leave the first ones out, and take the *median*.
#
# **Third.** Rank 0 reports its own time, but rank 1 has more samples:


# %%
def own_times(samples=(32, 2048)):
    rank = dist.get_rank()
    model = models.MLP(width=512)
    x = torch.randn(samples[rank], 64)

    def step():
        with torch.no_grad():
            model(x)

    own = []
    for _ in range(8):
        start = time.perf_counter()
        step()
        own.append(time.perf_counter() - start)
    return statistics.median(own[3:]), statistics.median(scaling.step_times(step))


# %% tags=["nbval-ignore-output"]
(own, slowest), (_, same) = launch(own_times).values
print(f"rank 0's own time {ms(own)}; until all ranks are through {ms(slowest)}")
assert slowest == same and slowest > 1.5 * own

# %% [markdown]
# **Fix.** A step has ended when it has ended everywhere: the slowest rank counts. (This step has no all-reduce. With one, rank 0 would wait for rank 1 and its clock would
# show it; but reading data, testing, and a window inside `no_sync` have none.) The honest clock is short; the median is left to who calls it:

# %%
show.source(scaling.step_times, scaling.wait_for_device)

# %% [markdown]
# ## 2. Where does a second rank pay?
#
# Three workloads. A small network; a CNN with much to compute and few weights; and a small network whose images come from a slow store (a
# `sleep` plays that store). Each rank has one thread and the same micro-batch, so two ranks do twice the work: *weak* scaling. The speed-up is
# 2 · t₁ / t₂. The times here are those of the *quickest* step: what the code can do on a machine that others use as well. (A report states the median, measured on a quiet one.)


# %%
def build(name):
    """A network, its micro-batch, seconds to read one, and how many steps to time."""
    if name == "small MLP":
        return models.MLP(width=32), 16, 0, 120
    if name == "CNN":
        return models.CNN(channels=32), 64, 0, 8
    return models.MLP(width=32), 16, 0.03, 4


def quickest_step(name):
    """Seconds of the quickest step: with all-reduces, and without."""
    torch.set_num_threads(1)
    net, micro_batch, reading, steps = build(name)
    model = DistributedDataParallel(net) if dist.get_world_size() > 1 else net
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(micro_batch, 64), torch.randint(10, (micro_batch,))

    def step():
        time.sleep(reading)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def quiet_step():
        with model.no_sync():
            step()

    if model is net:
        return [min(scaling.step_times(step, 2 * steps))] * 2  # nothing to switch off
    loud, quiet = [], []
    for _ in range(2):  # taking turns: what else the machine does then hits both
        loud += scaling.step_times(step, steps)
        quiet += scaling.step_times(quiet_step, steps)
    return min(loud), min(quiet)


# %%
NAMES = ("small MLP", "CNN", "slow store")
pays = predict.order(
    "Two ranks instead of one: who gains most? Most first.", ["CNN", "small MLP", "slow store"]
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
found = {(name, nproc): [] for name in NAMES for nproc in (1, 2)}
for _ in range(2):
    for name, nproc in found:
        found[name, nproc].append(launch(quickest_step, name, nproc=nproc).values[0])
    print("a turn is done")
step_of, quiet_of = (
    {key: min(turn[which] for turn in turns) for key, turns in found.items()}
    for which in (0, 1)
)
speedups = {name: 2 * step_of[name, 1] / step_of[name, 2] for name in NAMES}
ceilings = {name: 2 * step_of[name, 1] / quiet_of[name, 2] for name in NAMES}
for name in NAMES:
    print(f"{name:10}: one rank {ms(step_of[name, 1]):>7}, two {ms(step_of[name, 2]):>7}, "
          f"speed-up {speedups[name]:.2f}, without talking {ceilings[name]:.2f}")  # fmt: skip

# %% tags=["nbval-ignore-output"]
plots.speedup(
    {name: {1: 1.0, 2: speedups[name]} for name in NAMES},
    title="A second rank pays where a step is long and its messages are short",
)

# %% tags=["nbval-ignore-output"]
waits = {name: 1 - quiet_of[name, 2] / step_of[name, 2] for name in NAMES}
assert max(1.3, speedups["small MLP"]) < speedups["slow store"]
pays.compare(dict(sorted(speedups.items(), key=lambda item: -item[1])), unit="×")

# %% [markdown]
# Read the two speed-ups of a line. *Without talking* are the same two ranks with the all-reduces switched off by `no_sync`. What lies between the two is communication.
#
# * The **small MLP** gains nothing; on a quiet machine two ranks get *less* done than one. It computes for a fraction of a millisecond, then waits for a message
#   that has to be paid however little is in it: mostly the latency α. Even without talking it is far from 2: DDP's own Python around a backward costs about as much as this network.
# * The **CNN** computes long and has few weights, so little should lie between its two numbers. If you see more, it is not the message: one rank was late because another
#   program used its core, and the all-reduce waited for it.
# * The **slow store** waits. Two ranks wait at the same time.
#
# ## 3. Predict a step
#
# Lesson 02: an all-reduce of n bytes takes α + β·n. So a step should take *compute + α + β·n*. All three can be measured apart.


# %% tags=["nbval-ignore-output"]
def all_reduce_cost():
    sizes = [2**10, 2**14, 2**18, 2**21]
    return [(n, min(seconds_of(dist.all_reduce, n) for _ in range(3))) for n in sizes]


cost = fit(launch(all_reduce_cost).values[0])
print(f"α = {ms(cost.alpha)}, 1/β = {1e-6 / cost.beta:.0f} MB/s")
pairs, expected = {}, {}
for name in NAMES:
    nbytes = 4 * models.parameters_of(build(name)[0])
    expected[name] = scaling.predict(0, quiet_of[name, 2], [nbytes], cost.seconds)
    pairs[name] = 1000 * expected[name].seconds, 1000 * step_of[name, 2]
    print(f"{name:10}: {nbytes / 1000:.0f} kB, predicted share of communication "
          f"{expected[name].share:.0%}, measured {max(0, waits[name]):.0%}")  # fmt: skip
assert expected["small MLP"].share > expected["CNN"].share
assert all(1 / 8 < mine / measured < 8 for mine, measured in pairs.values())
plots.prediction(
    pairs, "ms a step", title="Compute + α + β·n predicts a step of two ranks"
)

# %% [markdown]
# From a step without messages, the step with them is roughly known: enough to see *which* part to work on. (The prediction tends to be short: ranks never arrive at quite
# the same moment, and DDP copies gradients into its buckets and back.) For the small MLP it is mostly α: a bigger micro-batch helps, or accumulation. No faster cable would.
#
# ### More ranks than you have
#
# A prediction needs no hardware. Take the CNN's time on one rank, and a network of 10 Gbit/s and 50 µs. A ring of N ranks sends 2 (N − 1) messages one after the other, each
# of n/N bytes (lesson 02); nothing overlaps here. What grows with N can be counted in two ways:
#
# * **strong** scaling: all ranks share *one* batch. Efficiency = t₁ / (N · t_N).
# * **weak** scaling: each rank has a batch as large as the one rank had. Efficiency = t₁ / t_N.
#
# And one more thing to guess first: a part of the step that is not shared out at all. (The last column of the table is explained below it.)

# %%
serial = predict.number(
    "5 % of a step cannot be shared out. Speed-up with 64 ranks?",
    start=60, unit="times", low=1, high=64,
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
link = SlowLink(gbit(10), latency=50e-6)
nbytes, alone = 4 * models.parameters_of(build("CNN")[0]), step_of["CNN", 1]
strong, weak = {1: 1.0}, {1: 1.0}
for ranks in (2, 4, 8, 16, 32, 64):
    talk = link.seconds(nbytes, ranks)
    shared = alone / ranks + talk
    strong[ranks] = ranks * scaling.efficiency(alone, shared, ranks, "strong")
    weak[ranks] = ranks * scaling.efficiency(alone, alone + talk, ranks, "weak")
    print(f"{ranks:2} ranks: strong {strong[ranks]:4.1f}, weak {weak[ranks]:4.1f}; as if "
          f"{scaling.serial_share(strong[ranks], ranks):.1%} were serial")  # fmt: skip
assert max(strong.values()) < weak[64] and strong[64] < 32
assert scaling.serial_share(strong[64], 64) > scaling.serial_share(strong[2], 2)
plots.speedup(
    {}, {"strong, one batch shared": strong, "weak, a batch each": weak},
    title="Predicted: shared among many, a batch is soon too small",
)  # fmt: skip

# %% tags=["nbval-ignore-output"]
assert scaling.amdahl(0.05, 64) < 1 / 0.05
law = scaling.amdahl(0.05, 64)
serial.compare(law, title="Amdahl: 5 % serial, at most 20 times", source="computed")

# %% [markdown]
# **Amdahl's law.** What is not shared out does not shrink: speed-up = 1 / (s + (1 − s) / N), less than 1 / s for any N. The last column turns it round (Karp
# and Flatt): which serial share would explain this speed-up? Here it *grows* with the ranks. So it is not serial work but
# communication: 2 (N − 1) latencies. (For messages as small as this NCCL uses trees instead of a ring: their latencies grow with log N only.) And a number without "strong" or "weak" beside it says nothing.
#
# ## 4. A slow link, and what wins it back
#
# Overlap, said lesson 04, hides communication. On this machine it hides nothing that you could time. Why?


# %% tags=["nbval-ignore-output"]
def processor_share(repeats=5):
    """Which part of the time of an all-reduce this rank keeps a core busy."""
    x, shares = torch.empty(2**24), []
    for _ in range(repeats):
        x.fill_(1)
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        dist.all_reduce(x)
        elapsed = time.perf_counter() - start
        shares.append((time.process_time() - worked) / elapsed)
    return max(shares)


busy = min(launch(processor_share).values)
print(f"while it all-reduces, a rank keeps its core busy for {busy:.0%} of the time")
assert busy > 0.05

# %% [markdown]
# Here the *cores* carry the messages: they copy, and add up. What runs "meanwhile" takes the core away from computing. A network card does not. (NCCL's
# all-reduce is itself a kernel: it borrows a few of the GPU's many multiprocessors, and the rest go on computing.) `SlowLink` stands for such a network: it waits, and leaves the
# cores alone. On it we try five cures, from 10 Gbit/s down to 100 Mbit/s:
#
# | way | what it does |
# | --- | --- |
# | one bucket | nothing: what the cures are compared with |
# | buckets | overlap (lesson 04) |
# | fp16, bf16 | sends each gradient in 16 bits |
# | no_sync, 4 each | one all-reduce for four micro-batches (lesson 07) |
# | PowerSGD | sends, for each weight matrix, two thin ones whose product is near to it; how thin is called their *rank*, here 2, which has nothing to do with processes |

# %%
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

SPEEDS = [mbit(10_000), mbit(1_000), mbit(100)]
WAYS = ("one bucket", "buckets", "fp16", "bf16", "no_sync, 4 each", "PowerSGD")


def wrap(way, link, width=512):
    """A network in DDP, whose gradients cross the link in this way."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # PowerSGD all-reduces again when a first one has arrived: on gloo, with several
    # buckets, in another order on each rank. So it gets one bucket.
    cap = 1 if way in ("buckets", "fp16", "bf16") else 1000  # MB
    model = DistributedDataParallel(models.MLP(width, depth=3), bucket_cap_mb=cap)
    state, hook = None, link
    if way == "fp16":
        hook = default_hooks.fp16_compress_wrapper(link)
    elif way == "bf16":
        hook = bf16_compress_wrapper(link)
    elif way == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)  # rank 2
        hook = power_sgd(link)
    model.register_comm_hook(state, hook)
    return model


# %%
def over_link(way, latency=50e-6):
    """The quickest time for a micro-batch at each speed, and the last gradient."""
    model = wrap(way, link := SlowLink(SPEEDS[0], latency))
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(64, 64), torch.randint(10, (64,))
    micro_batches = 4 if way.startswith("no_sync") else 1

    def step():
        model.zero_grad()
        with model.no_sync():
            for _ in range(micro_batches - 1):
                F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()

    seconds = {}
    for speed, steps in zip(SPEEDS, (12, 8, 4), strict=True):
        link.bandwidth = speed
        seconds[speed] = min(scaling.step_times(step, steps, warmup=1)) / micro_batches
    return seconds, torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
guess = predict.order(
    "At 100 Mbit/s: which cure leaves the shortest micro-batch? Shortest first.",
    ["buckets", "fp16", "no_sync, 4 each", "PowerSGD"],
)

# %% tags=["nbval-ignore-output"]
ways, gradients = {}, {}
for way in WAYS:
    ways[way], gradients[way] = launch(over_link, way).values[0]
    print(f"{way:15}", "   ".join(ms(seconds) for seconds in ways[way].values()))

# %% [markdown]
# And beforehand? Compute, buckets and link are known. The rule is lesson 04's: a bucket goes when it is full, and when the one before it has arrived.

# %%
show.source(scaling.predict)


# %% tags=["nbval-ignore-output"]
def predicted(compute, sizes, link):
    """Seconds of a step: backward takes twice as long as forward."""
    step = scaling.predict(
        compute / 3, 2 / 3 * compute, sizes, lambda n: link.seconds(n, 2)
    )
    return step.seconds


cuts = make_buckets(list(models.MLP(512, depth=3).parameters())[::-1], cap=2**20)
buckets = [bucket.buffer().nbytes for bucket in cuts]
compute = min(ways[way][SPEEDS[0]] for way in WAYS)  # with nearly nothing on the wire
calculated = {speed: predicted(compute, buckets, SlowLink(speed)) for speed in SPEEDS}
plots.slow_link(
    ways,
    {"buckets, predicted": calculated},
    title="On a fast link only fewer messages help; on a slow one, fewer bytes",
)

# %% tags=["nbval-ignore-output"]
slow = {way: times[SPEEDS[2]] for way, times in ways.items()}
wire = SlowLink(SPEEDS[2]).seconds(sum(buckets), 2)
assert min(slow["one bucket"], slow["buckets"]) > 0.98 * (wire - compute) > 0
assert slow["fp16"] < 0.9 * slow["buckets"] and slow["bf16"] < 0.9 * slow["buckets"]
assert slow["no_sync, 4 each"] < 0.6 * slow["buckets"]
assert slow["PowerSGD"] < 0.6 * slow["buckets"]
assert 0.8 < slow["buckets"] / calculated[SPEEDS[2]] < 2
cures = ["buckets", "fp16", "no_sync, 4 each", "PowerSGD"]
guess.compare({way: 1000 * slow[way] for way in sorted(cures, key=slow.get)}, unit="ms")

# %% [markdown]
# From left to right, ever slower:
#
# * **10 Gbit/s**: what is computed decides. Overlap and compression have little to save here, and cost something; *no_sync* leaves out three of four all-reduces with all the work
#   around them. (The grey prediction is too short: it knows the link, not what the cores do to carry messages on this machine.)
# * **1 Gbit/s**: compute and link are of one size. Overlap shows, and so does halving the bytes.
# * **100 Mbit/s**: *overlap* can hide at most what is computed meanwhile, and that is little now. *fp16* and *bf16* halve the bytes. *no_sync* pays once for
#   four micro-batches. *PowerSGD* sends two thin matrices instead of a gradient.
#
# What does that cost? `no_sync` makes the batch four times as large (lesson 06: the learning rate). Compression changes the gradient:

# %% tags=["nbval-ignore-output"]
exact = gradients["one bucket"]
lost = {
    way: ((gradients[way] - exact).norm() / exact.norm()).item()
    for way in ("buckets", "fp16", "bf16", "PowerSGD")
}
print(", ".join(f"{way}: {gap:.1e} off" for way, gap in lost.items()))
assert lost["buckets"] < 1e-6 < lost["fp16"] < lost["bf16"] < lost["PowerSGD"]

# %% [markdown]
# PowerSGD is a coarse sketch: off by 1 would be to send nothing. It remembers what it left out, and adds that to the next step's gradient. Here every step has the same batch, so a
# single gradient holds the debts of several steps. Whether a training bears it, only its loss curve tells.
#
# ## 5. How large a bucket?
#
# One bucket hides nothing, many pay the latency often. A deeper network, at 1 Gbit/s with a latency of 2 ms.


# %%
def with_buckets(caps, link):
    """For each cap in MB: seconds of the quickest step, and its messages."""
    torch.set_num_threads(1)
    x, y = torch.randn(512, 64), torch.randint(10, (512,))
    nets = {cap: models.MLP(512, depth=6) for cap in caps}
    nets = {c: DistributedDataParallel(n, bucket_cap_mb=c) for c, n in nets.items()}
    for model in nets.values():
        model.register_comm_hook(None, trace.recorded(link))
    kept = {cap: [] for cap in caps}
    for _ in range(4):
        for cap, model in nets.items():  # taking turns
            dist.barrier()
            trace.clear()
            start = time.perf_counter()
            F.cross_entropy(model(x), y).backward()
            kept[cap].append((time.perf_counter() - start, trace.spans()))
    return [min(steps[1:], key=lambda step: step[0]) for steps in kept.values()]


# %% tags=["nbval-ignore-output"]
measured, formula, needed = {}, {}, {}
link = SlowLink(mbit(1000), latency=0.002)
for seconds, spans in launch(with_buckets, (1000, 1, 0.001), link).values[0]:
    sizes = [span["bytes"] for span in spans]
    if len(sizes) == 1:  # all of its time is waited for: what is left is compute
        compute = seconds - link.seconds(sum(sizes), 2)
    measured[len(sizes)] = seconds
    formula[len(sizes)] = predicted(compute, sizes, link)
    needed[len(sizes)] = sum(link.seconds(size, 2) for size in sizes)
    assert trace.seconds(spans, "all-reduce") > 0.99 * needed[len(sizes)]  # none is early
    print(f"{len(sizes):2} buckets: {ms(seconds)}, predicted {ms(formula[len(sizes)])}, "
          f"the link alone {ms(needed[len(sizes)])}")  # fmt: skip
assert list(measured) == [1, 6, 13]
assert needed[13] > needed[6] > needed[1]  # each message pays its latency
assert formula[13] < compute + needed[13]  # and some of that is hidden
plots.bucket_sweep(
    {"measured": measured}, {"predicted": formula},
    title="One bucket hides nothing, many pay the latency often",
)  # fmt: skip

# %% [markdown]
# Where the best number lies depends on the network's latency and on how long backward is. DDP's default of 25 MB is meant for large networks on quick links. Measure before you
# change it, and change one thing at a time.
#
# ## 6. Find three slow-downs
#
# A training that somebody wrote in good faith: windows of four micro-batches, a link of 100 Mbit/s. It learns what it should, and it wastes most of its time, in **three**
# places. (Reading one image takes a millisecond: the slow store again.)


# %%
class FromStore(Dataset):
    def __init__(self):
        self.digits = data.digits()[0]

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        time.sleep(0.001)
        return self.digits[index]


def recorded(window, model, windows=3):
    """Run some windows over the slow link; return the last one's spans and the weights."""
    link = SlowLink(mbit(100), latency=0.002)
    model.register_comm_hook(None, trace.recorded(link))
    for _ in range(windows):
        dist.barrier()
        trace.clear()
        window()
    return trace.spans(), torch.cat([p.detach().flatten() for p in model.parameters()])


# %%
def slow_training():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = FromStore()
    sampler = DistributedSampler(images)
    batches = iter(DataLoader(images, 16, sampler=sampler))
    model = DistributedDataParallel(models.MLP(128, depth=4), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def window():
        for _ in range(4):
            with trace.span("data"):
                x, y = next(batches)
            with trace.span("forward"):
                loss = F.cross_entropy(model(x), y) / 4
            with trace.span("backward"):
                loss.backward()
        with trace.span("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()

    return recorded(window, model)


# %% [markdown]
# What to look at: a timeline for each rank, and the same in numbers.


# %%
def account(run):
    """Print what each rank spent its last window on; return the slowest rank's."""
    told = []
    for rank, (spans, _) in enumerate(run.values):
        sent = [span["bytes"] for span in spans if span["name"] == "all-reduce"]
        length = max(s["end"] for s in spans) - min(s["start"] for s in spans)
        told.append({
            "ms in all": 1000 * length,
            "for data": 1000 * trace.seconds(spans, "data"),
            "waiting for messages": 1000 * trace.seconds(spans, "waiting"),
            "messages": len(sent),
            "kB": sum(sent) / 1000,
        })  # fmt: skip
        words = (f"{value:.0f} {what}" for what, value in told[-1].items())
        print(f"rank {rank}:", ", ".join(words))
    return max(told, key=lambda mine: mine["ms in all"])


# %% tags=["nbval-ignore-output"]
slow_run = launch(slow_training)
before = account(slow_run)
spans_of = {"slow": [span for spans, _ in slow_run.values for span in spans]}
plots.timeline(spans_of["slow"], title="Where does this window go?")

# %%
costs = predict.order(
    "Three cures, each alone. Which saves most? Most first.",
    ["load data ahead", "no_sync", "larger buckets"],
)

# %% [markdown]
# Now you. Copy `slow_training` into the next cell as `my_training`, mend it, and run the cell until all three are gone. What the ranks learn must stay the same.
# (A `DataLoader` can read ahead, in other processes: `num_workers=2`.)

# %% tags=["nbval-ignore-output"]
my_training = slow_training  # put your own function here

run = launch(my_training)
after = account(run)
kb, kb_before = (told["kB"] / max(1, told["messages"]) for told in (after, before))
gone = {
    "waiting for data": after["for data"] < before["for data"] / 2,
    "sending too often": after["kB"] < before["kB"] / 2,
    "messages too small": kb > 2 * kb_before,
}
print("gone:", ", ".join(what for what in gone if gone[what]) or "none of the three yet")
off = (run.values[0][1] - slow_run.values[0][1]).abs().max().item()
print(f"weights: {off:.0e} from the slow training's (rounding is below 1e-05)")

# %% [markdown]
# **A solution.** Read on when you have tried. The three, and how each is seen:


# %%
def mended(workers=2, cap=25, quiet=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = FromStore()
    sampler = DistributedSampler(images)
    batches = iter(DataLoader(images, 16, sampler=sampler, num_workers=workers))
    model = DistributedDataParallel(models.MLP(128, depth=4), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def window():
        for k in range(4):
            with trace.span("data"):
                x, y = next(batches)
            with model.no_sync() if quiet and k < 3 else contextlib.nullcontext():
                with trace.span("forward"):
                    loss = F.cross_entropy(model(x), y) / 4
                with trace.span("backward"):
                    loss.backward()
        with trace.span("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()

    return recorded(window, model)


show.diff(slow_training, mended)

# %% tags=["nbval-ignore-output"]
cures = {
    "load data ahead": {"workers": 2, "cap": 0.0001, "quiet": False},
    "no_sync": {"workers": 0, "cap": 0.0001, "quiet": True},
    "larger buckets": {"workers": 0, "cap": 25, "quiet": False},
    "all three": {},
}
cured, accounts = {}, {}
for name, switches in cures.items():
    print(f"{name}:")
    cured[name] = launch(mended, **switches)
    accounts[name] = account(cured[name])
spans_of["all three"] = [s for spans, _ in cured["all three"].values for s in spans]
plots.timeline(spans_of, title="The same weights in a fraction of the time")

# %% tags=["nbval-ignore-output"]
total = {name: told["ms in all"] for name, told in accounts.items()}
saved = {name: before["ms in all"] - total[name] for name in costs.items}
assert accounts["load data ahead"]["for data"] < before["for data"]
assert accounts["no_sync"]["messages"] == before["messages"] / 4
assert accounts["larger buckets"]["messages"] == 4 < before["messages"] / 5
assert total["all three"] < before["ms in all"] / 2
weights = slow_run.values[0][1]
for run in cured.values():
    assert (run.values[0][1] - weights).abs().max() < 1e-5  # float32 rounding
costs.compare(dict(sorted(saved.items(), key=lambda item: -item[1])), unit="ms")

# %% [markdown]
# * **Data.** A block before each forward, while nothing else happens: the rank reads its images itself. With `num_workers` other processes read ahead
#   while it trains.
# * **no_sync.** All gradients cross after each micro-batch: four times the kB that a window needs.
# * **Buckets.** Many short messages, and each pays the latency.
#
# The three savings add up to more than the window: `no_sync` and larger buckets save the *same* messages. So take what saves most, then measure again: what the others save has changed.
#
# ## 7. A trace of each rank
#
# A real training has no `trace.span` in it. PyTorch's profiler sees every operation, and every all-reduce, in each rank. In this training one of the two ranks is slow.


# %%
def one_is_slow(folder, steps=4):
    torch.set_num_threads(1)
    model = DistributedDataParallel(models.MLP(width=256))
    x, y = torch.randn(64, 64), torch.randint(10, (64,))

    def step():
        with torch.profiler.record_function("augment"):
            time.sleep(0.1 if dist.get_rank() == 1 else 0.001)
        F.cross_entropy(model(x), y).backward()

    step()
    with trace.profile(folder):
        for _ in range(steps):
            step()


def longest(file, names):
    """Milliseconds of these events in a trace."""
    events = json.loads(file.read_text())["traceEvents"]
    return {
        name: sum(e["dur"] for e in events if e.get("name") == name and "dur" in e) / 1000
        for name in names
    }


# %%
straggler = predict.choose(
    "In whose trace is the all-reduce long?", ["the slow rank's", "the quick rank's"]
)

# %% tags=["nbval-ignore-output"]
EVENTS = ("augment", "aten::addmm", "gloo:all_reduce")
with tempfile.TemporaryDirectory() as folder:
    launch(one_is_slow, folder)
    traces = [longest(Path(folder, f"rank{rank}.json"), EVENTS) for rank in (0, 1)]
for rank, told in enumerate(traces):
    print(f"rank {rank}:", ", ".join(f"{n} {value:.1f} ms" for n, value in told.items()))
assert traces[1]["augment"] > 3 * traces[0]["augment"]  # rank 1 is the slow one
assert traces[0]["gloo:all_reduce"] > 1.5 * traces[1]["gloo:all_reduce"]
straggler.compare("the quick rank's")

# %% [markdown]
# The all-reduce is long on the rank that is *quick*: it waits there for the other. Who looks at rank 0's trace alone concludes that the network is slow. **Fix.** Look at all
# ranks, and search the cause in the one whose all-reduce is *short*. To see the traces themselves, give `trace.profile` a folder that stays, and drop its files on
# [ui.perfetto.dev](https://ui.perfetto.dev), which draws them without sending them anywhere.
#
# ### torch.compile
#
# It sends the same bytes. It is meant to make compute quicker where that consists of many small operations, and needs a C++ compiler on a CPU. The first call compiles, for half a
# minute or more on two cores, so it is off here. Switch it on, and see whether and when it has paid for itself.


# %% tags=["nbval-ignore-output"]
def small_operations(x):
    for _ in range(10):
        x = torch.tanh(x) * 0.9 + torch.sigmoid(x) * 0.1
    return x.sum()


def compiled():
    x, quick = torch.randn(2**18), torch.compile(small_operations)
    (first,) = scaling.step_times(lambda: quick(x), steps=1, warmup=0)
    eager = min(scaling.step_times(lambda: small_operations(x)))
    return first, eager, min(scaling.step_times(lambda: quick(x)))


TRY_COMPILE = False
if TRY_COMPILE and not any(map(shutil.which, ("c++", "g++", "clang++"))):
    print("there is no C++ compiler here, and torch.compile needs one for the CPU")
elif TRY_COMPILE:
    first, eager, after = launch(compiled, nproc=1).values[0]
    print(f"first call {first:.0f} s, then {ms(after)} instead of {ms(eager)}: "
          f"pays after {first / max(eager - after, 1e-9):,.0f} calls")  # fmt: skip
else:
    print("off: set TRY_COMPILE = True")

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("10_performance")

# %% [markdown]
# ## Exercise
#
# [10_scaling_report](../exercises/10_scaling_report.ipynb): write the report that a number about speed needs: the slowest rank, without warm-up, the samples of
# all ranks, and the right efficiency.
#
# ## How this looks on several GPUs and nodes
#
# * Kernels and NCCL's collectives run while Python goes on: without `torch.cuda.synchronize()` (or CUDA events) every time is wrong. `scaling.step_times` waits.
# * NCCL's messages run on the GPU, beside backward: there overlap shows in the time of a step. Within a node α is some tens of microseconds and 1/β hundreds of GB/s; between
#   nodes it is the network card's. Measure both with `collectives.seconds_of`.
# * Two GPUs do not share cores: the CNN's ceiling is close to 2.
# * A report names: how many ranks on what, strong or weak, the global batch, precision, median and spread, how many steps were left out, and what was compared.
#
# ## Where to read more
#
# * Amdahl: *Validity of the single processor approach to achieving large scale computing capabilities* (1967). Gustafson: *Reevaluating Amdahl's law* (1988).
# * Karp and Flatt: *Measuring parallel processor performance* (1990).
# * Vogels, Karimireddy, Jaggi: *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization* (2019).
# * PyTorch documentation: *DDP Communication Hooks*, *torch.profiler*, *Performance Tuning Guide*.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"an all-reduce returned after {returned / arrived:.1%} of its time")
print(f"the first step took {first_step / usual:.0f} times the usual one")
print("speed-up of two ranks:", ", ".join(f"{n} {up:.2f}" for n, up in speedups.items()))
print(f"α = {ms(cost.alpha)}; at 100 Mbit/s a micro-batch took",
      ", ".join(f"{ms(slow[way])} ({way})" for way in WAYS))  # fmt: skip
print("three slow-downs removed: "
      f"{before['ms in all']:.0f} → {total['all three']:.0f} ms")  # fmt: skip
