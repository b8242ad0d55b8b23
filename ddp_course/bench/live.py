"""Training with and without the live view, on as many ranks as there are cores."""

from .cases import COURSE, Case, Goal
from .kernel import kernel

OFF = "without the view"
SETUP = """
from ddp_course import launch, live, train
from ddp_course.process_group import cores
settings = train.Settings(task="digits", epochs=30, micro_batch=64)

def speed(on_record=None):
    records = launch(train.run, settings, nproc=cores(), on_record=on_record).records
    records = [r for r in records if r["rank"] == 0 and r["step"] > 20]
    return sum(r["samples"] for r in records) / sum(r["seconds"] for r in records)

def viewed():
    with live.view() as view:
        return speed(view)

_ = speed(), viewed()
"""


def measure(rounds: int, say) -> list[Case]:
    """Return one case: samples per second with the view, and before and after it without."""
    case = Case("training with the live view", "samples/s", more_is_better=True)
    case.goals.append(Goal(0.97, OFF))
    with kernel() as live:
        live.run(SETUP, timeout=300)
        for turn in range(3 * rounds):  # one ratio is worth little
            say(f"{case.name}: round {turn + 1}")
            live.run("before, seen, after = speed(), viewed(), speed()", timeout=300)
            case.add(COURSE, live.number("seen"))
            case.add(OFF, live.number("(before + after) / 2"))
    return [case]
