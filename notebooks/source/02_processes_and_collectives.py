# %% [markdown]
# # 02 · Processes and collectives
#
# **What you will do.** Bring two processes together by hand, once. Look at every collective before and after, on real ranks. Let
# two ranks wait for each other for ever. Build an all-reduce from nothing but send and receive, and measure what it costs.
#
# **What you will learn.** Rank, world size, process group, rendezvous; what each collective gives to whom; why a ring is the
# right shape; latency and bandwidth, and how to tell which of them you are paying for.
#
# **What you need.** Lesson 00. About 30 minutes.
#
# ---
# **The question.** Every rank has a tensor, and every rank needs the sum of all of them. Data-parallel training does this
# in every step, with all of the model's gradients. If you double the number of ranks, does each of them have twice as much to send?

# %% [markdown]
# ## 1. How processes find each other
#
# A **process group** is a set of processes that can call collectives together. Each has a **rank**, 0, 1, 2, …; their number is the
# **world size**. Tutorials often show one line for it:

# %%
import os

import torch
import torch.distributed as dist

for name in ("MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)  # in case that this notebook was started with them

try:
    dist.init_process_group("gloo", rank=0, world_size=2)
    print("the group is up")
except ValueError as error:
    message = str(error)
    print(message)

assert "MASTER_ADDR expected, but not set" in message

# %% [markdown]
# A rank and a world size are not enough. The processes also need a **rendezvous**: a place where all of them meet and leave
# their addresses. `MASTER_ADDR` and `MASTER_PORT` name one: rank 0 opens it there, the others come. Behind it is a
# **store**, a dictionary that processes reach over the network. Here is one, and a script that uses it. The backend, `"gloo"`,
# is the library that moves the bytes on CPUs; on GPUs it is `"nccl"`.

# %%
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("greeting", "hello from the notebook")

script = """
import os
import torch
import torch.distributed as dist

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
store = dist.TCPStore("127.0.0.1", int(os.environ["STORE_PORT"]), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
x = torch.ones(1)
dist.all_reduce(x)
greeting = store.get("greeting").decode()
print(f"rank {rank}, local rank {local_rank}: {greeting}, sum {x.item()}")
dist.destroy_process_group()
"""

# %% [markdown]
# We start it twice. Both processes get `LOCAL_RANK=0`, as if each were the first on a machine of its own.

# %%
import socket
import subprocess
import sys

loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def start(rank):
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "STORE_PORT": store.port}
    place["GLOO_SOCKET_IFNAME"] = loopback  # which network to use: see below
    environment = os.environ | {name: str(value) for name, value in place.items()}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


processes = [start(rank) for rank in (0, 1)]
print("two new Pythons import PyTorch: some seconds …")
said = [process.communicate(timeout=100)[0] for process in processes]
print(*said, sep="", end="")
assert all("hello from the notebook, sum 2.0" in line for line in said)

# %% [markdown]
# Two processes, one sum. Note the two numbers: **rank** counts over all machines, **local rank** on one machine. The
# GPU is chosen by the *local* rank: with 8 GPUs on each of two machines, rank 8 is local rank 0 of the second one, which has
# a `cuda:0` but no `cuda:8`.
#
# Now five ways in which this goes wrong.
#
# **The port is taken.** We let the store choose a free port, by asking for port 0. Scripts with a fixed number
# work until something else, often a first run of the same cell, still holds it:

# %% tags=["nbval-ignore-output"]
try:
    dist.TCPStore("127.0.0.1", store.port, is_master=True, wait_for_workers=False)
    taken = False
except dist.DistNetworkError as error:
    taken = "EADDRINUSE" in str(error)
    print(error)

assert taken

# %% [markdown]
# **Fix:** port 0, or a port that a launcher chooses for you.
#
# **The wrong network.** A machine has several network interfaces. gloo takes the one to use from `GLOO_SOCKET_IFNAME`. NCCL's variable
# `NCCL_SOCKET_IFNAME` has a richer language: `^lo` says "any but lo". Copied over to gloo, it is read as a name:


# %%
def one_rank_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


os.environ["GLOO_SOCKET_IFNAME"] = "^lo"
try:
    one_rank_group()
    message = "the group is up"
except RuntimeError as error:
    message = str(error)
print("…", message.partition("] ")[2])
assert "Unable to find address for: ^lo" in message

# %% [markdown]
# **A host name that leads nowhere.** Without the variable, gloo asks which address belongs to this machine's own host name. Here is the
# same question for a name that nobody has:

# %%
try:
    dist.ProcessGroupGloo.create_device(hostname="nowhere.invalid")
    message = "found"
except RuntimeError as error:
    message = str(error)
print(message)
assert "Cannot resolve nowhere.invalid" in message

# %% [markdown]
# For the machine's own name, PyTorch then warns and takes the loopback, an address that only processes on the same machine
# can reach: between machines, the start waits until it times out. **Fix** for both: name an interface that exists and leads to the
# others. For ranks on one machine that is the loopback, `lo` on Linux:

# %% tags=["nbval-ignore-output"]
os.environ["GLOO_SOCKET_IFNAME"] = loopback
one_rank_group()
print("interfaces:", *[name for _, name in socket.if_nameindex()])
print("the group is up over", os.environ["GLOO_SOCKET_IFNAME"])
assert dist.is_initialized()

# %% [markdown]
# **The cell is run twice.** The group of the first time is still up in this process, and there is only one default group. **Fix:**
# destroy the first one.

# %%
try:
    one_rank_group()
    message = "a second group"
except ValueError as error:
    message = str(error)
print(message)
assert "initialize the default process group twice" in message

dist.destroy_process_group()
one_rank_group()  # now it works
dist.destroy_process_group()
del os.environ["GLOO_SOCKET_IFNAME"]

# %% [markdown]
# **The start method.** Python can start processes in three ways. `spawn` and `forkserver` begin with a new Python, which looks for
# the function by its name, and a function from a cell is in no file. `fork` copies the notebook, but only the thread that forks:
# not the pool of threads in which PyTorch computes.
#
# > **Predict.** The same function from this cell, by each method. Which one succeeds?

# %% tags=["nbval-ignore-output"]
import multiprocessing
import warnings

torch.set_num_threads(max(2, torch.get_num_threads()))
square = torch.randn(400, 400)


def work():
    (square * square).sigmoid().sum()


# %% tags=["nbval-ignore-output"]
work()  # the notebook's thread pool is now in use
ended = {}
for method in multiprocessing.get_all_start_methods():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
    child.join(4 if method == "fork" else 60)
    ended[method] = "hangs" if child.is_alive() else f"exit code {child.exitcode}"
    child.kill()
    child.join()
    print(f"{method}: {ended[method]}")

assert ended["spawn"] == "exit code 1"
assert "exit code 0" not in ended.values()

# %% [markdown]
# None of them. (In JupyterLab, the red lines are the last words of the new Pythons: they did not find `work`.)
#
# Which one you get if you do not say also changes: on Linux `fork` up to Python 3.13 and `forkserver` from 3.14 on; on macOS and
# Windows `spawn`. Code that relies on the default breaks when it moves.

# %%
default = multiprocessing.get_start_method()
if sys.platform == "linux":
    assert default == ("fork" if sys.version_info < (3, 14) else "forkserver")
else:
    assert default == "spawn"
print("the default is as described")

# %% [markdown]
# `launch` does all of this for you: it holds a store at a free port on this machine's loopback, sends your function along, and
# brings the group up before your function begins. From here on we use it.

# %% [markdown]
# ## 2. Collectives, before and after
#
# Each cell below runs one collective on four ranks and draws what each rank held before and after. Ranks are rows, elements are
# columns, darker is larger, and a frame marks what is new. First the function that runs and draws:

# %%
from ddp_course import HangError, RankError, launch, plots
from ddp_course.process_group import this_rank


def see(collective, title, nproc=4):
    """Run a function that returns (before, after) on each rank; draw both."""

    def worker():
        if this_rank().backend == "nccl":
            torch.set_default_device("cuda")  # nccl moves what is on GPUs, gloo the rest
        return collective(dist.get_rank(), dist.get_world_size())

    before, after = zip(*launch(worker, nproc=nproc).values, strict=True)
    plots.show(plots.before_after(before, after, title))
    return after


# %% [markdown]
# **broadcast**: one rank's tensor to all. This is how DDP gives every rank the same weights at the start.


# %% tags=["nbval-ignore-output"]
def broadcast(rank, world_size):
    x = torch.tensor([3.0, 1.0, 4.0]) if rank == 0 else torch.zeros(3)
    before = x.clone()
    dist.broadcast(x, src=0)
    return before, x


after = see(broadcast, "broadcast: rank 0's tensor to every rank")
assert all(x.tolist() == [3, 1, 4] for x in after)

# %% [markdown]
# Every rank calls it, the receivers too, and each brings a tensor of the right size to be filled.
#
# **scatter** deals out a list, one tensor to each rank; **gather** is the way back.


# %% tags=["nbval-ignore-output"]
def scatter(rank, world_size):
    deal = [torch.tensor([10.0 * k]) for k in range(world_size)] if rank == 0 else None
    x = torch.zeros(1)
    dist.scatter(x, deal, src=0)
    return deal, x


after = see(scatter, "scatter: rank 0 deals its list out")
assert [x.item() for x in after] == [0, 10, 20, 30]


# %% tags=["nbval-ignore-output"]
def gather(rank, world_size):
    x = torch.tensor([10.0 * rank])
    room = [torch.zeros(1) for _ in range(world_size)] if rank == 0 else None
    dist.gather(x, room, dst=0)
    return x, room


after = see(gather, "gather: rank 0 collects one tensor from each")
assert [x.item() for x in after[0]] == [0, 10, 20, 30] and after[1] is None

# %% [markdown]
# **all_gather**: the same, but *every* rank gets the whole list. Sharded training (lesson 13) collects the parameters of a
# layer in this way.


# %% tags=["nbval-ignore-output"]
def all_gather(rank, world_size):
    x = torch.tensor([10.0 * rank])
    room = [torch.zeros(1) for _ in range(world_size)]
    dist.all_gather(room, x)
    return x, room


after = see(all_gather, "all_gather: every rank collects")
assert all(torch.cat(room).tolist() == [0, 10, 20, 30] for room in after)

# %% [markdown]
# Now those that *compute*. To see who contributed, rank 0 brings ones, rank 1 tens, rank 2 hundreds, rank 3 thousands: each
# digit of a sum is one rank.
#
# > **Predict.** `reduce` puts the sum on rank 0. What do the other ranks hold afterwards: their own numbers, zeros, or something else?


# %% tags=["nbval-ignore-output"]
def reduce(rank, world_size):
    x = torch.full((2,), 10.0**rank)
    before = x.clone()
    dist.reduce(x, dst=0)
    return before, x


after = see(reduce, "reduce: the sum is on rank 0, and only there is it defined")
assert after[0].tolist() == [1111, 1111]

# %% [markdown]
# Rank 0 has the sum. What is on the others is whatever the algorithm left there: in the picture made by gloo, partial sums, from which
# you can read the path that the sum took. Never use them.
#
# **all_reduce**: the sum on every rank. This is the one that averages gradients, and the rest of this lesson is about it.


# %% tags=["nbval-ignore-output"]
def all_reduce(rank, world_size):
    x = torch.full((2,), 10.0**rank)
    before = x.clone()
    dist.all_reduce(x)
    return before, x


after = see(all_reduce, "all_reduce: the sum on every rank")
assert all(x.tolist() == [1111, 1111] for x in after)

# %% [markdown]
# **reduce_scatter**: the sum too, but each rank gets only its own part of it.
#
# > **Predict.** Rank `r` brings `[r, 10 + r, 20 + r, 30 + r]`. Which number does rank 2 hold afterwards?

# %% tags=["nbval-ignore-output"]
from ddp_course import predict

guess = predict.number("What does rank 2 hold after the reduce_scatter?", start=23)


# %% tags=["nbval-ignore-output"]
def reduce_scatter(rank, world_size):
    x = torch.arange(world_size) * 10.0 + rank
    part = torch.zeros(1)
    dist.reduce_scatter(part, list(x.split(1)))
    return x, part


after = see(reduce_scatter, "reduce_scatter: each rank gets its part of the sum")
assert [part.item() for part in after] == [6, 46, 86, 126]
guess.compare(after[2].item(), title="Rank 2 holds the sum of everyone's element 2")

# %% [markdown]
# Element 2 of every rank, added up: 20 + 21 + 22 + 23.
#
# **all_to_all**: each rank has something for each other one. The grid is transposed. Mixture-of-experts models send tokens to
# their experts with it.


# %% tags=["nbval-ignore-output"]
def all_to_all(rank, world_size):
    x = torch.arange(world_size) + 10.0 * rank
    room = torch.zeros(world_size)
    dist.all_to_all_single(room, x)
    return x, room


after = see(all_to_all, "all_to_all: the grid of ranks and elements is transposed")
assert torch.equal(torch.stack(after)[1], torch.tensor([1.0, 11, 21, 31]))

# %% [markdown]
# One identity ties them together, and the ring below is built on it: **all_reduce = reduce_scatter, then all_gather.**


# %%
def both_ways():
    x = torch.arange(4.0) * 10 + dist.get_rank()
    part, room = torch.zeros(1), [torch.zeros(1) for _ in range(4)]
    dist.reduce_scatter(part, list(x.split(1)))
    dist.all_gather(room, part)
    dist.all_reduce(x)
    return torch.equal(torch.cat(room), x)


same = launch(both_ways, nproc=4, backend="gloo").values
print("equal on each rank:", same)
assert all(same)

# %% [markdown]
# ### Not every operation on every type
#
# `all_reduce` adds unless you say otherwise: `ReduceOp.MAX`, `MIN`, `PRODUCT`, `AVG`.
#
# > **Predict.** Two ranks want the mean of 1 and 2. Once as floats, once as whole numbers. What comes out?


# %% tags=["nbval-ignore-output"]
def mean_of(dtype):
    x = torch.tensor([1 + dist.get_rank()], dtype=dtype)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.item()


came = {}
for dtype in (torch.float32, torch.int64):
    try:
        came[dtype] = launch(mean_of, dtype, backend="gloo").values
    except RankError as caught:
        came[dtype] = caught.traceback.splitlines()[-1]
    print(dtype, came[dtype])

assert came[torch.float32] == [1.5, 1.5] or "AVG" in came[torch.float32]
assert "RuntimeError" in came[torch.int64]

# %% [markdown]
# Floats are right (older releases refuse `AVG` on gloo altogether); whole numbers are refused, since 1.5 does not fit. Be glad of the
# errors. For `reduce_scatter`, some releases of PyTorch took `AVG` on gloo and gave the *sum*, without a word (PyTorch's issue 162338).
# What does yours do?


# %% tags=["nbval-ignore-output"]
def mean_of_a_part():
    x, part = torch.tensor([1.0, 1.0]) + dist.get_rank(), torch.zeros(1)
    dist.reduce_scatter(part, list(x.split(1)), op=dist.ReduceOp.AVG)
    return part.item()


try:
    said = launch(mean_of_a_part, backend="gloo").values
    assert said in ([1.5, 1.5], [3, 3])
except RankError as caught:
    said = caught.traceback.splitlines()[-1]
verdict = {"[1.5, 1.5]": "right", "[3.0, 3.0]": "silently wrong"}.get(
    str(said), "refused"
)
print(f"reduce_scatter with AVG, PyTorch {torch.__version__}: {said}, {verdict}")

# %% [markdown]
# **Fix**, right in all releases: use `SUM`, and divide afterwards.


# %%
def mean_of_counts():
    x = torch.tensor([1 + dist.get_rank()])
    dist.all_reduce(x)  # SUM
    return x.item() / dist.get_world_size()


means = launch(mean_of_counts, backend="gloo").values
print(means)
assert means == [1.5, 1.5]

# %% [markdown]
# ## 3. Send and receive
#
# All of these are made of one thing: a rank sends, another receives. `send` and `recv` involve only two ranks, and here each names
# the other.


# %%
def pass_on(rank, world_size):
    x = torch.full((1,), float(rank))
    if rank == 0:
        dist.send(x + 7, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    return x


held = launch(lambda: pass_on(dist.get_rank(), 3).item(), nproc=3, backend="gloo").values
print(held)
assert held == [0, 7, 2]

# %% [markdown]
# Two ranks want to *exchange* tensors. A natural way to write it: receive what the other has, then send mine.
#
# > **Predict.** What happens?


# %% tags=["nbval-ignore-output"]
def receive_first():
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(1) * dist.get_rank(), torch.zeros(1)
    dist.recv(theirs, src=other)
    dist.send(mine, dst=other)
    return theirs.item()


error = None
try:
    launch(receive_first, backend="gloo")
except HangError as caught:
    error = caught
    print(error)

assert "rank 0 waits in recv" in str(error) and "rank 1 waits in recv" in str(error)

# %% [markdown]
# A **deadlock**: both wait to receive what neither has sent. `launch` saw that both wait and said where; without it, they would
# wait for PyTorch's time-out, half an hour with gloo (lesson 00). So send first?

# %% tags=["nbval-ignore-output"]
guess = predict.choose(
    "Both ranks send one number first, then receive. What happens?",
    ["they exchange their numbers", "they hang as well"],
)


# %% tags=["nbval-ignore-output"]
def send_first():
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(1) * dist.get_rank(), torch.zeros(1)
    dist.send(mine, dst=other)
    dist.recv(theirs, src=other)
    return theirs.item()


print("watching the two ranks for a few seconds …")
error = None
try:
    launch(send_first, backend="gloo")
except HangError as caught:
    error = caught
    print(error)

assert "rank 0 waits in send" in str(error) and "rank 1 waits in send" in str(error)
guess.compare("they hang as well")

# %% [markdown]
# `send` returns when the tensor may be overwritten. Whether that is before anybody receives is up to the backend: a library
# may keep a copy of a small message and go on. gloo does not, even for a single number, as you saw. Code that relies on such a copy
# hangs with another library, or when the model grows.
#
# **Fix:** start the send without waiting for it (`isend`), receive, then wait.


# %%
def exchange():
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(1) * dist.get_rank(), torch.zeros(1)
    sending = dist.isend(mine, dst=other)
    dist.recv(theirs, src=other)
    sending.wait()  # only now may `mine` be changed
    return theirs.item()


exchanged = launch(exchange, backend="gloo").values
print("rank 0 got", exchanged[0], "and rank 1 got", exchanged[1])
assert exchanged == [1.0, 0.0]

# %% [markdown]
# ## 4. An all-reduce by hand
#
# The simplest way: everybody sends to rank 0, which adds up and sends the sum back. It works. Let us count what goes over the
# wire of the busiest rank, in units of one tensor.


# %%
def through_rank_0(x):
    """Sum `x` over all ranks in place; return the bytes that this rank sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        arrived = torch.empty_like(x)
        for source in range(1, world_size):
            dist.recv(arrived, source)
            x += arrived
        for target in range(1, world_size):
            dist.send(x, target)
        return (world_size - 1) * x.nbytes
    dist.send(x, 0)
    dist.recv(x, 0)
    return x.nbytes


# %%
def share_sent(all_reduce_by_hand):
    x = torch.full((1200,), 10.0 ** dist.get_rank())
    sent = all_reduce_by_hand(x)
    assert (x == sum(10.0**r for r in range(dist.get_world_size()))).all()
    return sent / x.nbytes


for nproc in (2, 3, 4):
    star = launch(share_sent, through_rank_0, nproc=nproc, backend="gloo").values
    print(f"{nproc} ranks send", star, "tensors")
    assert star == [nproc - 1] + [1] * (nproc - 1)

# %% [markdown]
# Rank 0 sends N − 1 tensors (and receives as many), the others one. With 100 ranks, 99 of them wait for rank 0's wire.
#
# A **ring** shares the work out: cut the tensor into N chunks; in every step each rank sends one chunk to its right and
# receives another from its left. One time round, the chunks are added up (that is a reduce_scatter). A second time round,
# the finished chunks are passed on (an all_gather).
#
# > **Predict.** Four ranks. How many tensors' worth does each rank send in all?

# %% tags=["nbval-ignore-output"]
guess = predict.number(
    "Tensors that each of four ranks sends in a ring",
    start=3,
    unit="tensors",
    low=0,
    high=6,
)


# %%
from ddp_course import report


def ring(x):
    """The same by a ring; return the bytes that this rank sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = x.tensor_split(world_size)  # views of x: what we add to them, we add to x
    bytes_sent = 0
    report(step=0, chunks=x)
    for step in range(2 * (world_size - 1)):
        sent, received = (rank - step) % world_size, (rank - step - 1) % world_size
        arrived = torch.empty_like(chunks[received])
        sending = dist.isend(chunks[sent], right)
        dist.recv(arrived, left)
        sending.wait()
        if step < world_size - 1:
            chunks[received].add_(arrived)  # first time round: add up
        else:
            chunks[received].copy_(arrived)  # second time: pass the finished sum on
        bytes_sent += chunks[sent].nbytes
        report(step=step + 1, chunks=x, sent=sent, received=received)
    return bytes_sent


# %%
for nproc in (2, 3, 4):
    shares = launch(share_sent, ring, nproc=nproc, backend="gloo").values
    print(f"{nproc} ranks send", *[f"{share:.3f}" for share in shares], "tensors")
    assert all(abs(share - 2 * (nproc - 1) / nproc) < 1e-12 for share in shares)

# %% tags=["nbval-ignore-output"]
guess.compare(shares[0], title="Each rank of a ring of four sends one and a half tensors")

# %% [markdown]
# 2 (N − 1) / N tensors for each rank: always less than 2, however many ranks. That is the answer to the question above. It is also
# the least with which an all-reduce can do (Patarasuk and Yuan, 2009).
#
# Now watch it. Four ranks with four chunks each, ones, tens, hundreds and thousands as before. Move the slider (or
# use the arrow keys): the frame is around the chunk that has just arrived.

# %% tags=["nbval-ignore-output"]
steps = launch(
    lambda: ring(torch.full((4,), 10.0 ** dist.get_rank())), nproc=4, backend="gloo"
)
plots.ring_slider(steps)

# %%
last = [record for record in steps.records if record["step"] == 6]
finished = [record for record in steps.records if record["step"] == 3]
for record in finished:  # half-way, each rank holds exactly one finished chunk
    assert (record["chunks"] == 1111).sum() == 1
assert all((record["chunks"] == 1111).all() for record in last)
print("after 3 steps one finished chunk a rank, after 6 steps all of them")

# %% [markdown]
# In each step all ranks send and receive at the same time, each over its own wire: nobody is the bottleneck. Here is one step as a
# picture:

# %% tags=["nbval-ignore-output"]
plots.ring(steps, 2)

# %% [markdown]
# The package has the same ring, `collectives.ring_all_reduce`, in a form that NCCL takes as well and that copes with empty chunks:

# %%
from ddp_course import collectives, show

show.source(collectives.ring_steps, collectives._exchange)

# %% [markdown]
# ### Break it: everyone adds up for itself
#
# Why not simply `all_gather` everything, and let every rank add up what it has? It sends more. There is a worse fault. Each
# rank below adds the four tensors beginning with its own.
#
# > **Predict.** Do all ranks get the same sum, bit for bit?


# %% tags=["nbval-ignore-output"]
def sums():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = torch.randn(1000)
    parts = [torch.empty(1000) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    own_order, backend_order = mine.clone(), mine.clone()
    for step in range(1, world_size):
        own_order += parts[(rank + step) % world_size]
    collectives.ring_all_reduce(mine)
    dist.all_reduce(backend_order)
    return own_order, mine, backend_order


ways = zip(*launch(sums, nproc=4, backend="gloo").values, strict=True)
names = ("in one's own order", "in our ring", "in gloo's all_reduce")
for name, sums_of_ranks in zip(names, ways, strict=True):
    counts = [(sums_of_ranks[0] != x).sum().item() for x in sums_of_ranks]
    print(f"elements that differ from rank 0's, adding up {name}: {counts}")
    if name == names[0]:
        differ = counts
    assert all(counts[1:]) if name == names[0] else not any(counts)

# %% [markdown]
# Floating-point sums depend on the order of adding: the last bits differ. Ranks that add up in different orders hold
# *different* gradients, and after many steps different models. In the ring each chunk is added up in one order, once, and then
# copied; gloo's all-reduce keeps the ranks equal as well. Every all-reduce that training relies on must have this property.

# %% [markdown]
# ## 5. What does it cost?
#
# Time the all-reduce of your backend on two ranks, for tensors from 1 kB to 64 MB. The clock stops when the *last* rank
# has its sum; each point is the median of several.
#
# > **Predict.** 1 MB is a thousand times as much as 1 kB. How many times as long does it take?

# %% tags=["nbval-ignore-output"]
guess = predict.number(
    "1 MB takes … times as long as 1 kB", 1000, "times", low=0, high=2000
)


# %% tags=["nbval-ignore-output"]
def measure(sizes):
    for size in sizes:
        seconds = collectives.seconds_of(dist.all_reduce, size)
        if dist.get_rank() == 0:
            report(bytes=size, seconds=seconds)
            print(f"{size:12,} bytes {1e3 * seconds:9.2f} ms")


run = launch(measure, [1024 * 4**power for power in range(9)])
points = [(record["bytes"], record["seconds"]) for record in run.records]
times = dict(points)

# %% tags=["nbval-ignore-output"]
longer = times[1024 * 1024] / times[1024]
assert longer < 300  # far from a thousand times
assert times[64 * 2**20] > 3 * times[1024]
guess.compare(
    longer, title="A thousand times the bytes is far from a thousand times the time"
)

# %% [markdown]
# A message costs a fixed time α, the **latency**, however small it is, and β seconds for each byte: $t = \alpha + \beta n$. Two numbers
# that we can fit:

# %% tags=["nbval-ignore-output"]
cost = collectives.fit(points)
assert cost.alpha > 0 and cost.beta > 0
assert cost.seconds(64 * 2**20) > 3 * cost.seconds(1024)
plots.time_against_bytes(points, cost)

# %% [markdown]
# Left, a flat part: there you pay for *messages*. Right, a straight climb: there you pay for *bytes*. So many small all-reduces are a
# bad idea. A model has a hundred small parameters, of 256 numbers each.
#
# > **Predict.** One all-reduce for each of them, or one for all together: how many times as long?

# %% tags=["nbval-ignore-output"]
guess = predict.number(
    "A hundred all-reduces of 1 kB take … times as long as one of 100 kB",
    start=5, unit="times", low=0, high=200,
)  # fmt: skip


# %% tags=["nbval-ignore-output"]
def one_by_one_or_together():
    def one_by_one(x):
        for part in x.split(256):
            dist.all_reduce(part)

    size = 100 * 1024
    return collectives.seconds_of(one_by_one, size), collectives.seconds_of(
        dist.all_reduce, size
    )


one_by_one, together = launch(one_by_one_or_together).values[0]
model = 100 * cost.seconds(1024) / cost.seconds(100 * 1024)
print(f"measured {one_by_one / together:.0f} times, by α + β·n {model:.0f} times")
assert one_by_one > 2 * together
guess.compare(
    one_by_one / together, title="Many small messages pay for latency each time"
)

# %% [markdown]
# (By α + β·n it is at most a hundred: anything above comes from other work on this machine.)
#
# This is why DDP does not reduce parameter by parameter: it fills **buckets** of about 25 MB (lesson 04).
#
# ### Two bandwidths
#
# Reports give a speed in bytes per second, and there are two of them. **Algorithm bandwidth** is the tensor's bytes
# divided by the time. It falls with more ranks even if the network is as good as ever, since each must send 2 (N − 1) / N tensors.
# **Bus bandwidth** multiplies by just that: what went over each wire, to be compared with what the wire can do.

# %% tags=["nbval-ignore-output"]
size, seconds = points[-1]
algorithm = collectives.algorithm_bandwidth(size, seconds)
print(f"{size / 1e6:.0f} MB on 2 ranks: {algorithm / 1e9:.2f} GB/s")
for ranks in (2, 8, 1000):
    bus = collectives.bus_bandwidth(size, seconds, ranks)
    print(f"if {ranks} ranks took that long, bus bandwidth {bus / 1e9:.2f} GB/s")
assert collectives.bus_bandwidth(size, seconds, 2) == algorithm

# %% [markdown]
# With two ranks both are the same; with many, bus bandwidth is nearly twice the other. When you compare numbers, ask which one it is.
#
# And our ring, a few lines of Python? It sends no more than it must. Is that enough to be as fast as the backend?


# %% tags=["nbval-ignore-output"]
def ring_against_backend():
    both = (collectives.ring_all_reduce, dist.all_reduce)
    return [collectives.seconds_of(how, 64 * 2**20, repeats=5) for how in both]


by_hand, backend = launch(ring_against_backend).values[0]
speed = backend / by_hand
print(f"at 64 MB the ring by hand has {speed:.0%} of the backend's speed")
assert speed > 0.05  # the right amount of bytes: not many times slower

# %% [markdown]
# (A machine that is busy with other things changes this number from run to run. Run it again.)

# %% [markdown]
# ## Quiz

# %% tags=["nbval-ignore-output"]
from ddp_course import quiz

quiz.ask("02_processes_and_collectives")

# %% [markdown]
# ## Exercise
#
# [02_ring_all_reduce](../exercises/02_ring_all_reduce.ipynb): write the ring yourself, for any number of ranks and any size of tensor. It is checked for the sum, for the
# same bits on every rank, for the bytes that each rank sends, and for not hanging.
#
# ## How this looks on several GPUs and nodes
#
# The same calls, over NCCL: `launch` takes it when each rank has a GPU of its own. Bandwidth then depends on what connects the GPUs: links
# between those of one machine are faster than the network between machines. And the latency of a ring grows with N, since a chunk
# passes through all ranks. So NCCL has more than rings: trees, for instance, whose latency grows with log N. What you measured here is two
# processes on one CPU; α + β·n describes GPUs as well, with other numbers.
#
# A script for several machines says `dist.init_process_group("nccl")` and nothing more: `torchrun` has set `RANK`, `LOCAL_RANK`,
# `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in each process. The script adds `torch.cuda.set_device(local_rank)`, before anything
# else touches a GPU.
#
# ## Where to read more
#
# *P. Patarasuk, X. Yuan*, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009: the ring, and why nothing sends
# less. *R. Thakur, R. Rabenseifner, W. Gropp*, Optimization of collective communication operations in MPICH, 2005: which algorithm for
# which size. NVIDIA's nccl-tests, its file PERFORMANCE.md: the two bandwidths. The PyTorch documentation's page on `torch.distributed`.
#
# ## What you measured

# %% tags=["nbval-ignore-output"]
print(f"""- start methods, with a function from a cell: {ended}
- both ranks receiving first hang; both sending first hang, too
- four ranks: rank 0 of a star sends {star[0]:.0f} tensors, each of a ring {shares[0]}
- {differ[1]} of 1,000 sums differ in their last bits if each rank adds in its own order
- latency α = {1e6 * cost.alpha:.0f} µs, bandwidth 1/β = {1e-9 / cost.beta:.2f} GB/s
- a hundred small all-reduces take {one_by_one / together:.0f} times as long as one
- the ring by hand: {speed:.0%} of the backend's speed at 64 MB""")
