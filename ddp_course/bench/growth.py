"""How cost grows: with ranks, with records, with submissions. No cliff, linear or better."""

import shutil
import tempfile
import time
from pathlib import Path

from ..launch import launch
from ..process_group import this_rank
from ..rank import report
from .cases import Case, Goal, in_turns
from .grade import NOT_HERE, SOLUTIONS, seconds_to_grade

RANKS = (1, 2, 4, 8, 16)
RECORDS = (1_000, 10_000, 100_000)
SUBMISSIONS = (10, 30, 100)
EXERCISE = "05_shard_indices"
NOISE = 0.8  # the cost of one may still come out this much worse where it is the same


def measure(rounds: int, say) -> list[Case]:
    """Return a case for each kind of growth: the cost of one, when there are few and many."""
    launch(this_rank)  # starts the fork server
    return [
        _growth("launch, per rank", "s", "ranks", RANKS, _launch, rounds, say),
        _growth("a record from a rank", "s", "records", RECORDS, _records, rounds, say),
        _submissions(say),
    ]


def _growth(name, unit, what, counts, seconds, rounds, say) -> Case:
    """Compare the cost of one, at the largest count, with that at each smaller one."""
    labels = {f"{count:,} {what if count > 1 else what[:-1]}": count for count in counts}
    *fewer, most = labels
    goals = [Goal(NOISE, label) for label in fewer]
    case = Case(f"{name}, when there are {most}", unit, ours=most, goals=goals)

    def timed(count):
        say(f"{name}: {count:,} {what}")
        return seconds(count) / count

    calls = {label: lambda count=count: timed(count) for label, count in labels.items()}
    return in_turns(case, calls, rounds)


def _launch(ranks: int) -> float:
    began = time.perf_counter()
    launch(this_rank, nproc=ranks)
    return time.perf_counter() - began


def _records(records: int) -> float:
    """Return the seconds from the first record's arrival to the last one's."""
    arrived = []
    launch(_tell, records, nproc=1, on_record=lambda record: arrived.append(time.perf_counter()))
    assert len(arrived) == records
    return arrived[-1] - arrived[0]


def _tell(records: int) -> None:
    for step in range(records):
        report(step=step, loss=1 / (step + 1))


def _submissions(say) -> Case:
    solution = SOLUTIONS / f"{EXERCISE}.ipynb"
    if not solution.exists():
        return Case("grading, per submission", "s", notes=[NOT_HERE])

    def seconds(count):
        with tempfile.TemporaryDirectory() as folder:
            for student in range(count):
                shutil.copy(solution, Path(folder, f"student{student:03}.ipynb"))
            return seconds_to_grade(folder, EXERCISE)

    return _growth("grading, per submission", "s", "submissions", SUBMISSIONS, seconds, 1, say)
