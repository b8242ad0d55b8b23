"""Wrong and right answers to 02_ring_all_reduce: what each is told."""

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def swap(outgoing, incoming):
    """Send to the right and receive from the left at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    work = dist.isend(outgoing.contiguous(), (rank + 1) % n)
    dist.recv(incoming, (rank - 1) % n)
    work.wait()


def ring(x, steps=0, gather=True, add_again=False, mean=False):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.tensor_split(n))
    for step in range(n - 1 - steps):
        incoming = torch.empty_like(chunks[(rank - step - 1) % n])
        swap(chunks[(rank - step) % n], incoming)
        chunks[(rank - step - 1) % n] += incoming
    for step in range(n - 1) if gather else ():
        target = chunks[(rank - step) % n]
        incoming = torch.empty_like(target)
        swap(chunks[(rank - step + 1) % n], incoming)
        target.copy_(target + incoming if add_again else incoming)
    if mean:
        x /= n


@wrong("it calls all_reduce")
def uses_all_reduce(x):
    dist.all_reduce(x)


@wrong("elements are right. After the reduce-scatter")
def reduce_scatter_only(x):
    ring(x, gather=False)


@wrong("added once more in the all-gather")
def adds_in_the_second_half(x):
    ring(x, add_again=True)


@wrong("It is the mean")
def averages(x):
    ring(x, mean=True)


@wrong("x is what it was: replace it in place")
def returns_a_new_one(x):
    y = x.clone()
    ring(y)
    return y


def steps(x):
    """What is sent and what is received, as numbers of chunks, in each step of the ring."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [((rank - step) % n, (rank - step - 1) % n, step < n - 1) for step in range(2 * (n - 1))]


@wrong("You replaced list entries (chunks[i] = …) or changed a copy; x itself was not changed")
def replaces_list_entries(x):
    chunks = list(x.tensor_split(dist.get_world_size()))
    for out, into, adding in steps(x):
        incoming = torch.empty_like(chunks[into])
        swap(chunks[out], incoming)
        chunks[into] = chunks[into] + incoming if adding else incoming


@wrong("what arrives in the all-gather only replaces list entries")
def replaces_list_entries_in_the_all_gather(x):
    chunks = list(x.tensor_split(dist.get_world_size()))
    for out, into, adding in steps(x):
        incoming = torch.empty_like(chunks[into])
        swap(chunks[out], incoming)
        if adding:
            chunks[into] += incoming
        else:
            chunks[into] = incoming


@wrong("tensor_split gives a tuple, whose entries cannot be replaced")
def adds_to_an_entry_of_a_tuple(x):
    chunks = x.tensor_split(dist.get_world_size())
    for out, into, adding in steps(x):
        incoming = torch.empty_like(chunks[into])
        swap(chunks[out], incoming)
        if adding:
            chunks[into] += incoming
        else:
            chunks[into].copy_(incoming)


@wrong("a rank receives into a tensor of another size")
def receives_a_smaller_chunk(x):
    swap(x, torch.empty_like(x[1:]))


@wrong("send one chunk a step, not the whole tensor")
def sends_all_of_it_round(x):
    travelling, total = x.clone(), x.clone()
    for _ in range(dist.get_world_size() - 1):
        incoming = torch.empty_like(x)
        swap(travelling, incoming)
        travelling = incoming
        total += incoming
    x.copy_(total)
    for _ in range(dist.get_world_size() - 1):  # so that all have rank 0's bits
        incoming = torch.empty_like(x)
        swap(x, incoming)
        if dist.get_rank():
            x.copy_(incoming)


@wrong("all ranks wait in send")
def all_send_first(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    incoming = torch.empty_like(x)
    dist.send(x, (rank + 1) % n)
    dist.recv(incoming, (rank - 1) % n)
    x += incoming


@wrong("right neighbour alone")
def through_rank_0(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(x, 0)
        dist.recv(x, 0)
        return
    for other in range(1, n):
        incoming = torch.empty_like(x)
        dist.recv(incoming, other)
        x += incoming
    for other in range(1, n):
        dist.send(x, other)


@wrong("a size that does not divide")
def only_even_sizes(x):
    n = dist.get_world_size()
    if len(x) % n:
        raise ValueError("a size that does not divide")
    ring(x)


@wrong("part is missing")
def first_two_only(x):
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 2:
        return ring(x)
    incoming, travelling, total = torch.empty_like(x), x.clone(), x.clone()
    for _ in range(n - 2):
        swap(travelling, incoming)
        travelling = incoming.clone()
        total += incoming
    x.copy_(total)
    return rank


@right
def in_place(x):
    ring(x)


@right
def with_padding(x):
    n = dist.get_world_size()
    padded = torch.zeros(-(-len(x) // n) * n, dtype=x.dtype)
    padded[: len(x)] = x
    ring(padded)
    x.copy_(padded[: len(x)])


@right
def with_batches(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = x.tensor_split(n)

    def exchange(out, into):
        operations = []
        if out.numel():
            operations.append(dist.P2POp(dist.isend, out, (rank + 1) % n))
        if into.numel():
            operations.append(dist.P2POp(dist.irecv, into, (rank - 1) % n))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    for step in range(2 * (n - 1)):
        out, into = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        arrived = torch.empty_like(into)
        exchange(out, arrived)
        into.copy_(into + arrived if step < n - 1 else arrived)


@right
def even_ranks_send_first(x):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(2 * (n - 1)):
        parts = x.tensor_split(n)
        out, into = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        box = torch.zeros_like(into)
        first = rank % 2 == 0 and rank != n - 1
        for sending in (first, not first):
            if sending:
                dist.send(out.clone(), (rank + 1) % n)
            else:
                dist.recv(box, (rank - 1) % n)
        if step < n - 1:
            into += box
        else:
            into[:] = box
