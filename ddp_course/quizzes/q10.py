"""Lesson 10: honest times, efficiency, what limits a step, and which cure helps."""

from ..quiz import choice, number


def strong_efficiency(random, alone=None, ranks=None, percent=None):
    alone = alone or random.choice([240, 480, 960])
    ranks = ranks or random.choice([4, 8])
    percent = percent or random.choice([50, 60, 75, 80])
    together = 100 * alone / (ranks * percent)
    return {
        "question": f"One GPU needs {alone} ms for a step with a batch of 512. {ranks} GPUs share "
        f"the same 512 and need {together:,.4g} ms. What is the efficiency?",
        "answer": percent,
        "unit": "%",
        "why": f"Strong scaling, one batch shared: t₁ / (N · t_N) = {alone} / ({ranks} × "
        f"{together:,.4g}) = {percent} %.",
        "mistakes": {
            100 * alone / together: "That is the speed-up: divide it by the number of GPUs.",
            100 * ranks * together / alone: "The other way round: at best it is 100 %.",
        },
    }


def share_of_waiting(random, compute=None, megabytes=None, ranks=None):
    compute = compute or random.choice([30, 60, 90])
    megabytes = megabytes or random.choice([50, 100, 200])
    ranks = ranks or random.choice([4, 8])
    wire = 2 * (ranks - 1) / ranks * megabytes / 1.25  # ms at 10 Gbit/s
    whole = megabytes / 1.25
    return {
        "question": f"A step computes for {compute} ms. {megabytes} MB of gradients then cross a "
        f"link of 10 Gbit/s (1,250 MB/s) in a ring of {ranks} ranks; nothing overlaps, and the "
        "latency does not count. For which share of the step do the ranks wait?",
        "answer": 100 * wire / (compute + wire),
        "unit": "%",
        "tolerance": 0.02,
        "why": f"Each rank sends 2 (N − 1) / N × {megabytes} MB = "
        f"{2 * (ranks - 1) / ranks * megabytes:.4g} MB, for {wire:.4g} ms; {wire:.4g} / ({compute} "
        f"+ {wire:.4g}) = {wire / (compute + wire):.1%}.",
        "mistakes": {
            100 * whole / (compute + whole): "In a ring each rank sends 2 (N − 1) / N times the "
            "bytes (lesson 02).",
            100 * wire / compute: "That is in relation to the compute, not to the whole step.",
        },
    }


def amdahl(random, percent=None, ranks=None):
    percent = percent or random.choice([2, 4, 5, 10])
    ranks = ranks or random.choice([16, 32, 100])
    speedup = 1 / (percent / 100 + (1 - percent / 100) / ranks)
    return {
        "question": f"{percent} % of a step cannot be shared out, the rest can, perfectly. What is "
        f"the speed-up with {ranks} ranks?",
        "answer": speedup,
        "unit": "times",
        "tolerance": 0.02,
        "why": f"1 / ({percent / 100:g} + {1 - percent / 100:g} / {ranks}) = {speedup:.3g}.",
        "mistakes": {
            ranks * (1 - percent / 100): "What is not shared takes as long as before, however "
            "short the rest gets.",
            100 / percent: "That is the limit for infinitely many ranks.",
        },
    }


QUESTIONS = [
    choice(
        "On a GPU a forward was timed with `time.perf_counter()` before and after it: 0.2 ms, "
        "whatever the batch. What was measured?",
        right="How long it takes to ask for the work",
        why="The GPU works on while Python goes on. `torch.cuda.synchronize()` before each reading "
        "of the clock waits for it.",
        wrong={
            "The forward: GPUs are that quick": "Then it would grow with the batch.",
            "The first step, with its warm-up": "A warm-up makes a time too long, not too short.",
            "The copy to the GPU": "That grows with the batch as well.",
        },
    ),
    number(strong_efficiency, original={"alone": 480, "ranks": 8, "percent": 75}),
    number(share_of_waiting, original={"compute": 60, "megabytes": 100, "ranks": 4}),
    number(amdahl, original={"percent": 5, "ranks": 32}),
    choice(
        "Traces of four ranks: the all-reduce takes 41, 40, 3 and 42 ms. Where do you look for the "
        "slow-down?",
        right="In the compute of the rank with 3 ms",
        why="The others wait for it in the all-reduce; when it comes at last, nothing is left to "
        "wait for.",
        wrong={
            "In the network: 40 ms is too long": "Then it would take long on all four.",
            "In the rank with 42 ms": "It was ready first, and waited longest.",
            "In the size of the buckets": "All ranks have the same buckets.",
        },
    ),
    choice(
        "A small network, a step of 2 ms, of which 1.5 ms go to one message of 40 kB. What helps?",
        right="Fewer messages: accumulate with `no_sync`, or a larger micro-batch",
        why="40 kB are sent in no time. What is paid is α, once a message.",
        wrong={
            "fp16 compression": "Half of nearly nothing: α stays.",
            "A cable of ten times the bandwidth": "The bytes are not what takes the time.",
            "Smaller buckets": "More messages, and each pays α.",
        },
    ),
]
