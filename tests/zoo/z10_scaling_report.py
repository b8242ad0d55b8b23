"""Wrong and right answers to 10_scaling_report: what each is told."""

import statistics

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def over_ranks(values, op=dist.ReduceOp.MAX):
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=op)
    return tensor.tolist()


def one_time(job):
    dist.barrier()
    job.synchronize()
    start = job.clock()
    job.step()
    job.synchronize()
    return job.clock() - start


def own_times(job, steps, warmup):
    return [one_time(job) for _ in range(warmup + steps)][warmup:]


def all_samples(job):
    return over_ranks([job.samples], dist.ReduceOp.SUM)[0]


def share(alone, seconds, kind):
    return alone / seconds / (dist.get_world_size() if kind == "strong" else 1)


def report_of(slowest, samples, alone, kind, seconds, efficiency=share):
    return {
        "ranks": dist.get_world_size(),
        "samples": samples,
        "seconds": seconds,
        "worst": max(slowest),
        "samples_per_second": samples / seconds,
        "efficiency": efficiency(alone, seconds, kind),
    }


def made(
    times=own_times, join=over_ranks, reduce=statistics.median, samples=all_samples,
    efficiency=share,
):  # fmt: skip
    """A report with one thing changed."""

    def scaling_report(job, alone, kind, steps, warmup):
        slowest = join(times(job, steps, warmup))
        seconds = reduce(slowest)
        return report_of(slowest, samples(job), alone, kind, seconds, efficiency)

    return scaling_report


def add(name, message, **change):
    fn = made(**change)
    fn.__name__ = name
    WRONG[fn] = message


def with_warmup(job, steps, warmup):
    return own_times(job, warmup + steps, 0)


def without_warmup(job, steps, warmup):
    return own_times(job, steps, 0)


def one_more(job, steps, warmup):
    return own_times(job, steps, warmup + 1)


def never_waits(job, steps, warmup):
    times = []
    for _ in range(warmup + steps):
        dist.barrier()
        start = job.clock()
        job.step()
        times.append(job.clock() - start)
    return times[warmup:]


def never_together(job, steps, warmup):
    times = []
    for _ in range(warmup + steps):
        job.synchronize()
        start = job.clock()
        job.step()
        job.synchronize()
        times.append(job.clock() - start)
    return times[warmup:]


def barrier_inside(job, steps, warmup):
    times = []
    for _ in range(warmup + steps):
        dist.barrier()
        job.synchronize()
        start = job.clock()
        job.step()
        job.synchronize()
        dist.barrier()
        times.append(job.clock() - start)
    return times[warmup:]


def mean_over_ranks(times):
    return over_ranks(times, dist.ReduceOp.AVG)


def of_rank_0(times):
    tensor = torch.tensor(times, dtype=torch.float64)
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


add("with_warmup", "The warm-up counts in it", times=with_warmup)
add("without_warmup", "it runs 7 steps: 3 to warm up, and then 7 that are timed",
    times=without_warmup)  # fmt: skip
add("one_more", "it runs 11 steps, where 3 to warm up and 7 more are wanted", times=one_more)
add("own", "own time. A step has ended when it has ended everywhere", join=list)
add("rank_0s", "It is rank 0's time on all ranks", join=of_rank_0)
add("mean_over_ranks", "It is the mean over the ranks", join=mean_over_ranks)
add("quickest_rank", "It is the quickest rank's",
    join=lambda times: over_ranks(times, dist.ReduceOp.MIN))  # fmt: skip
add("mean_of_steps", "which one odd step drags along", reduce=statistics.fmean)
add("all_steps", "the time of all steps together", reduce=sum)
add("quickest_step", "That flatters", reduce=min)
add("slowest_step", "It is the slowest step of all", reduce=max)
add("lower_median", "torch.median takes the lower one", reduce=statistics.median_low)
add("own_samples", "It counts the samples of one rank alone", samples=lambda job: job.samples)
add("times_ranks", "times the number of ranks, but the ranks do not",
    samples=lambda job: job.samples * dist.get_world_size())  # fmt: skip
add("speedup", "That is the speed-up, or weak scaling's efficiency",
    efficiency=lambda alone, seconds, kind: alone / seconds)  # fmt: skip
add("always_strong", "That is strong scaling's efficiency",
    efficiency=lambda alone, seconds, kind: alone / seconds / dist.get_world_size())  # fmt: skip
add("upside_down", "It is upside down",
    efficiency=lambda alone, seconds, kind: 1 / share(alone, seconds, kind))  # fmt: skip
add("percent", "It is in percent",
    efficiency=lambda alone, seconds, kind: 100 * share(alone, seconds, kind))  # fmt: skip
add("never_waits", "The clock was read while the device had work to do", times=never_waits)
add("never_together", "the ranks do not begin a step together", times=never_together)
add("barrier_inside", "there is a collective between the two readings", times=barrier_inside)


@wrong("It is the largest of the ranks' medians")
def largest_median(job, alone, kind, steps, warmup):
    times = own_times(job, steps, warmup)
    seconds = over_ranks([statistics.median(times)])[0]
    return report_of(over_ranks(times), all_samples(job), alone, kind, seconds)


@wrong("It is the mean of the ranks' medians")
def mean_median(job, alone, kind, steps, warmup):
    times = own_times(job, steps, warmup)
    seconds = over_ranks([statistics.median(times)], dist.ReduceOp.AVG)[0]
    return report_of(over_ranks(times), all_samples(job), alone, kind, seconds)


@wrong("Were readings of the clocks of different ranks")
def compares_clocks(job, alone, kind, steps, warmup):
    spans = []
    for _ in range(warmup + steps):
        dist.barrier()
        job.synchronize()
        start = job.clock()
        job.step()
        job.synchronize()
        spans.append((start, job.clock()))
    starts, ends = zip(*spans[warmup:], strict=True)
    first, last = over_ranks(starts, dist.ReduceOp.MIN), over_ranks(ends)
    times = [end - start for start, end in zip(first, last, strict=True)]
    return report_of(times, all_samples(job), alone, kind, statistics.median(times))


@wrong("It is the longest of the timed steps")
def worst_of_its_own(job, alone, kind, steps, warmup):
    times = own_times(job, steps, warmup)
    seconds = statistics.median(over_ranks(times))
    return report_of(times, all_samples(job), alone, kind, seconds)


@wrong("the report has no worst")
def leaves_out_the_worst(job, alone, kind, steps, warmup):
    report = made()(job, alone, kind, steps, warmup)
    del report["worst"]
    return report


@wrong("it should return a dict on every rank, not None")
def only_on_rank_0(job, alone, kind, steps, warmup):
    report = made()(job, alone, kind, steps, warmup)
    return report if dist.get_rank() == 0 else None


@wrong("Likely: a collective that not every rank calls")
def collective_on_rank_0(job, alone, kind, steps, warmup):
    times = own_times(job, steps, warmup)
    if dist.get_rank() == 0:
        slowest = over_ranks(times)
        seconds = statistics.median(slowest)
        return report_of(slowest, all_samples(job), alone, kind, seconds)
    return {}


@wrong("a number")
def in_words(job, alone, kind, steps, warmup):
    report = made()(job, alone, kind, steps, warmup)
    return report | {"seconds": f"{1000 * report['seconds']:.1f} ms"}


in_order = made()
in_order.__name__ = "in_order"
right(in_order)


@right
def with_the_package(job, alone, kind, steps, warmup):
    from ddp_course import scaling

    seconds = statistics.median(slowest := over_ranks(own_times(job, steps, warmup)))
    ranks, samples = dist.get_world_size(), [None] * dist.get_world_size()
    dist.all_gather_object(samples, job.samples)
    return {
        "ranks": ranks,
        "samples": sum(samples),
        "seconds": seconds,
        "worst": max(slowest),
        "samples_per_second": scaling.samples_per_second(samples, seconds),
        "efficiency": scaling.efficiency(alone, seconds, ranks, kind),
    }


@right
def exchanges_each_time_at_once(job, alone, kind, steps, warmup):
    """No barrier after the first: the all-reduce of each time lets the ranks begin together."""
    slowest = []
    dist.barrier()
    for number in range(-warmup, steps):
        job.synchronize()
        start = job.clock()
        job.step()
        job.synchronize()
        (longest,) = over_ranks([job.clock() - start])
        slowest += [longest] * (number >= 0)
    return report_of(slowest, all_samples(job), alone, kind, sorted_median(slowest))


def sorted_median(values):
    values, half = sorted(values), len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) / 2


@right
def in_one_message_on_float32_tensors(job, alone, kind, steps, warmup):
    """Gathers everything at the end; returns tensors."""
    for _ in range(warmup):
        job.step()
    job.synchronize()
    mine = torch.zeros(steps + 1)
    for number in range(steps):
        mine[number] = one_time(job)
    mine[steps] = job.samples
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    every = torch.stack(every)
    slowest, samples = every[:, :steps].amax(0), every[:, steps].sum()
    seconds = slowest.quantile(0.5)
    ideal = alone / len(every) if kind == "strong" else alone
    return {
        "ranks": torch.tensor(len(every)),
        "samples": samples,
        "seconds": seconds,
        "worst": slowest.max(),
        "samples_per_second": samples / seconds,
        "efficiency": ideal / seconds,
    }
