"""Lesson 02: ranks on two machines, what collectives give, deadlocks, the ring, and its cost."""

from ..quiz import choice, number


def place_on_a_node(random, gpus=None, rank=None):
    gpus = gpus or random.choice([4, 8])
    rank = rank or gpus * random.choice([1, 2]) + 3  # GPU 3 of the second or third machine
    local = rank % gpus
    return {
        "question": f"Machines with {gpus} GPUs each, one rank a GPU, ranks numbered machine by "
        f"machine. Rank {rank} calls `torch.cuda.set_device(…)`: with which number?",
        "answer": local,
        "why": f"With its *local* rank, {rank} mod {gpus} = {local}: the GPUs of each machine "
        "count from 0.",
        "mistakes": {
            rank: f"That is its rank over all machines. Its own machine has GPUs 0 to {gpus - 1}.",
            rank // gpus: "That is the number of its machine, not of its GPU.",
        },
    }


def part_of_a_sum(random, ranks=None, asked=None):
    n = ranks or random.choice([6, 8])
    k = random.randrange(1, n) if asked is None else asked
    total = sum(100 * k + r for r in range(n))
    return {
        "question": f"{n} ranks call `reduce_scatter`, now with other numbers: rank r brings "
        f"[r, 100 + r, 200 + r, …], {n} elements. What does rank {k} hold afterwards?",
        "answer": total,
        "tolerance": 1e-6,
        "why": f"Element {k} of every rank, added up: {n} × {100 * k} + (0 + … + {n - 1}) = "
        f"{total}.",
        "mistakes": {
            100 * k + k: "That is what it brought itself. Element by element, the ranks' tensors "
            "are added up first.",
            sum(100 * j + k for j in range(n)): "You added up along the rank's own tensor. A "
            "reduction adds over *ranks*, element by element.",
        },
    }


def bytes_in_a_ring(random, ranks=None, megabytes=None):
    n = ranks or random.choice([3, 5, 10, 16])
    size = megabytes or random.choice([60, 120, 240, 480])
    answer = 2 * (n - 1) / n * size
    return {
        "question": f"{n} ranks reduce gradients of {size} MB with a ring all-reduce. How many MB "
        "does each rank send?",
        "answer": answer,
        "unit": "MB",
        "tolerance": 0.005,
        "why": f"2 × ({n} − 1) steps, in each of them one chunk of {size} / {n} MB: "
        f"2 × {n - 1} / {n} × {size} = {answer:g} MB.",
        "mistakes": {
            (n - 1) * size: "That is rank 0's load if everything goes through rank 0.",
            (n - 1) / n * size: "One time round only: that is the reduce_scatter. The finished "
            "chunks go round once more.",
            2 * size: "Nearly. A chunk takes N − 1 steps to get round N ranks, not N.",
            2 * (n - 1) * size: "In each step a rank sends one *chunk*, not the whole tensor.",
        },
    }


def one_message_or_many(random, latency=None):
    alpha = latency or random.choice([20, 50, 200])  # microseconds
    count, kilobytes, speed = 200, random.choice([2, 4]), 2  # GB/s, that is 2 kB per microsecond
    if latency == 100:
        kilobytes = 4
    each, together = alpha + kilobytes / speed, alpha + count * kilobytes / speed
    answer = count * each / together
    return {
        "question": f"With α = {alpha} µs and 1/β = {speed} GB/s: how many times as long do "
        f"{count} all-reduces of {kilobytes} kB take as one of {count * kilobytes} kB? (Section 5, "
        "with your own α and β, is the same sum.)",
        "answer": answer,
        "tolerance": 0.02,
        "why": f"{kilobytes} kB take {alpha} + {kilobytes / speed:g} = {each:g} µs, {count} times. "
        f"{count * kilobytes} kB take {alpha} + {count * kilobytes / speed:g} = {together:g} µs. "
        f"{count} × {each:g} / {together:g} = {answer:.3g}.",
        "mistakes": {
            count: "That would be so if only latency counted. The large message also pays for its "
            "bytes.",
            1: "The bytes are the same, but each message pays α again.",
        },
    }


QUESTIONS = [
    number(place_on_a_node, original={"gpus": 8, "rank": 13}),
    number(part_of_a_sum, original={"ranks": 4, "asked": 3}),
    choice(
        "All ranks call `dist.send(x, right)` and then `dist.recv(y, left)`. With one library it "
        "works for small tensors. What is true?",
        right="It may hang: `send` need not return before somebody receives",
        why="Whether a small message is copied away is up to the backend; gloo waits even for one "
        "number. `isend`, `recv`, `wait` is right everywhere.",
        wrong={
            "It is right: a send does not need a receiver": "It needs one sooner or later, and a "
            "backend may wait for it. In section 3 both ranks hung.",
            "It is right if the tensors are small": "That is luck with one library: gloo hung "
            "with a single number.",
            "It always hangs, and `isend` would, too": "`isend` returns at once; the rank goes on "
            "to `recv`, and both sides are served.",
        },
    ),
    number(bytes_in_a_ring, original={"ranks": 4, "megabytes": 100}),
    choice(
        "Each rank collects everyone's gradients with `all_gather` and adds them up, its own "
        "first. What is wrong with that, apart from the bytes?",
        right="The sums differ between ranks in their last bits",
        why="Floating-point addition depends on the order. Weights that differ in a bit drift "
        "apart. A ring adds each chunk up once and copies the result.",
        wrong={
            "Nothing: a sum is a sum": "On paper. In section 4, where you did just that, the order "
            "of floating-point additions showed in the last bits.",
            "It only works for two ranks": "It gives a sum for any number of ranks; for two it is "
            "even the same on both, as a + b = b + a.",
            "The result is the mean and not the sum": "Nothing was divided.",
        },
    ),
    number(one_message_or_many, original={"latency": 100}),
]
