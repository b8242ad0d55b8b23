"""10 · scaling_report(job, alone, kind, steps, warmup): what a number about speed must contain.

The job's steps last as long as a plan says, on a clock of its own on each rank: so the right report
is known exactly. Which readings of the clock, waits and collectives came when is written down.
"""

import statistics

import torch

from ..compare import many, wrong_kind
from ..exercise import Case, Exercise, calls, generator, same_calls

KEYS = ("ranks", "samples", "seconds", "worst", "samples_per_second", "efficiency")
ALLOWED = 1e-6  # relative: seconds may have been float32
WARMUP = 3


class Job:
    """A training whose steps last what `times` says; `log` holds what was done, in order.

    With `queued`, a step only asks for the work, as on a GPU: `synchronize` waits for it.
    """

    def __init__(self, times: list[float], samples: int, zero: float, queued: bool):
        self.samples, self.log = samples, []
        self._times, self._now, self._queued, self._pending = iter(times), zero, queued, 0.0

    def _note(self, what: str) -> None:
        self.log.append((what, len(calls()), self._pending > 0))

    def step(self) -> None:
        self._note("step")
        self._pending += next(self._times, 0.0)
        if not self._queued:
            self.synchronize(note=False)

    def synchronize(self, note: bool = True) -> None:
        if note:
            self._note("synchronize")
        self._now, self._pending = self._now + self._pending, 0.0

    def clock(self) -> float:
        self._note("clock")
        self._now += 1e-9  # asking takes time, too
        return self._now


def _plan(name: str, seed: int, world_size: int) -> dict:
    """Return what every rank is given: times [rank][step] in seconds, samples by rank, …"""
    draw = generator(seed, len(name))
    steps = 8 if name == "even" else 7
    times = 0.1 + 0.05 * torch.rand(world_size, WARMUP + steps, generator=draw, dtype=torch.float64)
    for step in range(WARMUP + steps):
        times[step % world_size, step] += 0.1  # the ranks take turns in being slow
    times[:, :WARMUP] *= 20  # what is done once
    if name == "equal":
        times[:] = times[0]
    else:
        times[:, -1] *= 6  # the machine did something else in one step
        times = times[times[:, WARMUP:].median(1).values.argsort()]  # rank 0's is the smallest
    samples = [32] * world_size
    if name in ("uneven", "queued"):
        samples = [20 + 12 * rank for rank in range(world_size)]
    alone = 0.1 * world_size + 0.1 * float(torch.rand(1, generator=draw))
    return {
        "times": times.tolist(),
        "samples": samples,
        "alone": alone,
        "kind": "weak" if name in ("weak", "even") else "strong",
        "steps": steps,
        "zeros": [1e5 * (1 + (rank * 7) % 5) for rank in range(world_size)],
        "queued": name == "queued",
    }


def _run(name: str):
    def run(fn, rank, world_size, seed):
        plan = _plan(name, seed, world_size)
        given = (plan["times"][rank], plan["samples"][rank], plan["zeros"][rank], plan["queued"])
        job, before = Job(*given), len(calls())
        report = fn(job, plan["alone"], plan["kind"], plan["steps"], WARMUP)
        if isinstance(report, dict):
            told = {str(key): _plain(value) for key, value in report.items()}
        else:
            told = repr(report)[:200]
        return {"report": told, "log": job.log, "collectives": calls()[before:]}

    return run


def _plain(value):
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, int | float | str) else repr(value)[:100]


# ---- in the parent


def _report(plan: dict, rows: list[list[float]], reduce=statistics.median) -> dict:
    """Return the right report, from the seconds that count, [step][rank]."""
    slowest = [max(row) for row in rows]
    ranks, samples = len(plan["samples"]), sum(plan["samples"])
    seconds = reduce(slowest)
    parts = ranks if plan["kind"] == "strong" else 1
    return {
        "ranks": ranks,
        "samples": samples,
        "seconds": seconds,
        "worst": max(slowest),
        "samples_per_second": samples / seconds,
        "efficiency": plan["alone"] / (parts * seconds),
    }


def _judge(name: str):
    def judge(outputs, world_size, seed):
        plan = _plan(name, seed, world_size)
        rows = list(zip(*plan["times"], strict=True))
        right = _report(plan, rows[WARMUP:])
        for rank, output in enumerate(outputs):
            if wrong := _incomplete(output["report"]) or _counted(output["log"], plan["steps"]):
                return f"rank {rank}: {wrong}"
        for rank, output in enumerate(outputs):
            for key in KEYS:
                value = output["report"][key]
                if not _close(value, right[key]):
                    told = f"rank {rank}: {key} is {value:.6g}, not {right[key]:.6g}."
                    return f"{told}\n{_likely(key, value, plan, rank, right, outputs)}"
        for rank, output in enumerate(outputs if plan["queued"] else ()):
            if wrong := _out_of_order(output["log"], world_size):
                return f"rank {rank}: {wrong}"
        return same_calls(outputs)

    return judge


def _incomplete(report) -> str | None:
    if not isinstance(report, dict):
        return f"it should return a dict on every rank, not {report}."
    if missing := [key for key in KEYS if key not in report]:
        return f"the report has no {', '.join(missing)}."
    for key in KEYS:
        if isinstance(report[key], str) or (kind := wrong_kind(report[key], 1.0)):
            return f"{key} is {report[key] if isinstance(report[key], str) else kind}: a number."
    return None


def _counted(log, steps: int) -> str | None:
    done = sum(what == "step" for what, _, _ in log)
    if done == WARMUP + steps:
        return None
    if done == steps:
        return (
            f"it runs {many(done, 'step')}: {WARMUP} to warm up, and then {steps} that are timed."
        )
    return f"it runs {many(done, 'step')}, where {WARMUP} to warm up and {steps} more are wanted."


def _close(value, right) -> bool:
    return abs(value - right) <= ALLOWED * abs(right)


def _likely(key, value, plan, rank, right, outputs) -> str:
    if key == "seconds":
        return _seconds(value, plan, rank, outputs)
    if key == "worst":
        return "It is the longest of the timed steps, on the rank that took longest."
    if key == "ranks":
        return "It is the number of ranks in the process group."
    if key in ("samples", "samples_per_second"):
        own, ranks = plan["samples"][rank], right["ranks"]
        shares = {
            own: "It counts the samples of one rank alone: add up those of all ranks.",
            own * ranks: "It is one rank's samples times the number of ranks, but the ranks do not "
            "have equally many: add them up.",
        }
        times = 1 if key == "samples" else 1 / right["seconds"]
        likely = [words for count, words in shares.items() if _close(value, count * times)]
        return likely[0] if likely else "Every sample of a step counts once, over all ranks."
    return _efficiency(value, plan, right)


def _efficiency(value, plan, right) -> str:
    ranks, ratio = right["ranks"], plan["alone"] / right["seconds"]
    strong = (
        '"strong": the ranks share the batch that one process had to itself, so at best they need '
        "1/N of its time: alone / (ranks · seconds)."
    )
    weak = (
        '"weak": each rank has a batch as large as that of the one process, so at best they need '
        "as long as it: alone / seconds."
    )
    if plan["kind"] == "strong" and _close(value, ratio):
        return f"That is the speed-up, or weak scaling's efficiency. {strong}"
    if plan["kind"] == "weak" and _close(value, ratio / ranks):
        return f"That is strong scaling's efficiency. {weak}"
    if any(_close(value, other) for other in (1 / ratio, ranks / ratio)):
        return "It is upside down: the share of the ideal that was reached, 1 at best."
    if any(_close(value, 100 * other) for other in (ratio, ratio / ranks)):
        return "It is in percent: give a share, 1 at best."
    return strong if plan["kind"] == "strong" else weak


def _seconds(value, plan, rank, outputs) -> str:
    timed = [times[WARMUP:] for times in plan["times"]]
    rows, own = list(zip(*timed, strict=True)), timed[rank]
    slowest, all_rows = [max(row) for row in rows], list(zip(*plan["times"], strict=True))
    median, median_low, mean = statistics.median, statistics.median_low, statistics.fmean
    if plan["queued"] and any(_unfinished(output["log"]) for output in outputs):
        return UNFINISHED
    told = [output["report"]["seconds"] for output in outputs]
    if len(set(told)) == 1 < len(told) and _close(value, median(timed[0])):
        return (
            "It is rank 0's time on all ranks. A step has ended when it has ended everywhere: the "
            "slowest rank counts."
        )
    mistakes = [
        (median(max(row) for row in all_rows), "The warm-up counts in it: leave it out."),
        (mean(max(row) for row in all_rows), "It is a mean with the warm-up in it."),
        (mean(slowest), "It is the mean of the steps, which one odd step drags along: take the "
         "median."),
        (sum(slowest), "It is the time of all steps together: what is asked for is one step."),
        (min(slowest), "It is the quickest step. That flatters: take the median."),
        (median_low(slowest), "With an even number of steps the median is the mean of the two in "
         "the middle, as in statistics.median; torch.median takes the lower one."),
        (max(slowest), "It is the slowest step of all: take the median."),
        (median(own), f"It is rank {rank}'s own time. A step has ended when it has ended "
         "everywhere: the slowest rank counts."),
        (mean(own), f"It is the mean of rank {rank}'s own steps: the slowest rank counts, and the "
         "median of the steps."),
        (median(mean(row) for row in rows), f"It is the mean over the ranks. {MOST}"),
        (median(min(row) for row in rows), f"It is the quickest rank's. {MOST}"),
        (mean(median(times) for times in timed), f"It is the mean of the ranks' medians. {MOST}"),
        (max(median(times) for times in timed), "It is the largest of the ranks' medians. Another "
         "rank may be the slowest in another step: the maximum over ranks of each step comes "
         "first, then the median."),
        (min(median(times) for times in timed), "It is the smallest of the ranks' medians."),
    ]  # fmt: skip
    for wrong, words in mistakes:
        if _close(value, wrong):
            return words
    if abs(value) > 1e3:
        return (
            "That is far more than any step took. Were readings of the clocks of different ranks "
            "compared? They do not begin at the same moment: subtract on each rank first."
        )
    return "It is the median over the timed steps of the slowest rank's time."


MOST = "All wait for the slowest: the maximum counts."
UNFINISHED = (
    "The clock was read while the device had work to do: `step` only asks for it. Call "
    "job.synchronize() before each reading, at the start and at the end."
)


def _unfinished(log) -> bool:
    return any(what == "clock" and pending for what, _, pending in log)


def _out_of_order(log, world_size: int) -> str | None:
    """Say what is wrong with when the clock was read, synchronised and talked, or None."""
    if _unfinished(log):
        return UNFINISHED
    numbers = [number for number, (what, _, _) in enumerate(log) if what == "step"]
    for count, number in enumerate(numbers):
        if count < WARMUP:
            continue
        start = _reading(log[:number][::-1])
        end = _reading(log[number + 1 :])
        if start is None or end is None:
            return f"timed step {count - WARMUP + 1} has no reading of the clock on both sides."
        if world_size > 1 and start[1] == log[numbers[count - 1]][1]:
            return (
                "the ranks do not begin a step together: without a dist.barrier() before the clock "
                "is read, a rank that is late makes the others' step look long."
            )
        if end[1] > start[1]:
            return (
                "there is a collective between the two readings of the clock, so its time counts "
                "as the step's: barrier before, all-reduce of the times after."
            )
    return None


def _reading(log):
    return next((entry for entry in log if entry[0] == "clock"), None)


STUCK = (
    "Likely: a collective that not every rank calls, such as one inside `if rank == 0`. All ranks "
    "need the report."
)


def _case(title: str, points: int, name: str, worlds=(1, 2, 3)) -> Case:
    return Case(title, points, _run(name), _judge(name), worlds, stuck=STUCK)


EXERCISE = Exercise(
    "10_scaling_report",
    "scaling_report",
    ("job", "alone", "kind", "steps", "warmup"),
    (
        _case("ranks that are equally quick", 2, "equal", (1, 2)),
        _case("another rank is the slowest in each step", 3, "slowest", (3,)),
        _case("ranks with unequal numbers of samples", 2, "uneven", (3,)),
        _case("weak scaling", 2, "weak", (2,)),
        _case("an even number of steps", 1, "even", (2,)),
        _case("when the clock is read, on a device that works on meanwhile", 3, "queued", (1, 3)),
    ),
)
