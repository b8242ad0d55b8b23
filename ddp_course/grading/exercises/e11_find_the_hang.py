"""11 · find_the_hang(program): the rank, the line, and the program mended."""

import torch

from ..compare import off
from ..exercise import Case, Exercise, calls, same_calls
from .broken import PROGRAMS, expected, inputs

# What the notebook's run of each program on three ranks shows: the rank, lines that may be named,
# and lines that are named often and are not to blame.
FOUND = {
    "epoch_loss": (1, ("for loss in losses", "dist.all_reduce(both)"), {}),
    "accuracy": (
        0,
        ("if dist.get_rank() == 0", "share = share_of_all(counts)"),
        {
            "dist.all_reduce(counts)": "it is where rank 0 waits, and it is right: all may call "
            "share_of_all. Read the stack from the top: which line lets only rank 0 call it?",
            "dist.barrier()": "there the others are, as they should be.",
        },
    ),
    "average_gradients": (2, ("dist.all_reduce(p.grad)",), {}),
    "train_until": (
        1,
        ("if loss > limit", "break"),
        {
            "dist.barrier()": "it is where rank 1 waits. Which line sent it there, and no other?",
            "dist.all_reduce(mean)": "it is where the others wait, as they should.",
        },
    ),
    "sum_metrics": (2, ("for name in metrics", "dist.all_reduce(metrics[name])"), {}),
}


def _answer(fn, program):
    """Return (rank, line, mended) of a submission's answer, or a text that says what is wrong."""
    answer = fn(program)
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        return f'find_the_hang("{program}") returns {answer!r:.80}, not (rank, line, function).'
    if not callable(answer[2]):
        return f'find_the_hang("{program}"): the third part is no function: {answer[2]!r:.80}.'
    return tuple(answer)


def _diagnosis(program):
    def run(fn, rank, world_size, seed):
        answer = _answer(fn, program)
        if isinstance(answer, str):
            return {"wrong": answer}
        who, line, _ = answer
        whole = isinstance(who, int) and not isinstance(who, bool)
        return {
            "rank": who if whole else f"{who!r:.80}",
            "line": line if isinstance(line, str) else [f"{line!r:.80}"],
        }

    def judge(outputs, world_size, seed):
        told = outputs[0]
        if "wrong" in told:
            return told["wrong"]
        right, lines, innocent = FOUND[program]
        if not isinstance(told["line"], str):
            return f"the line is {told['line'][0]}: give it as text, copied from the program."
        if told["rank"] != right:
            return (
                f"{program}: rank {told['rank']} is where it should be. Look for the one that "
                "never came, failed first, or does what no other does."
            )
        line = _bare(told["line"])
        if line in lines:
            return None
        if line in innocent:
            return f"{program}: {line!r} is not to blame: {innocent[line]}"
        return f"{program}: {line!r} is not the line where rank {right} leaves the others' path."

    return run, judge


def _bare(line: str) -> str:
    """Return a line of code without its indent, comment and colon."""
    return " ".join(line.partition("#")[0].split()).rstrip(":").rstrip()


def _mended(program):
    def run(fn, rank, world_size, seed):
        answer = _answer(fn, program)
        if isinstance(answer, str):
            return {"wrong": answer}
        arguments, called = inputs(program, seed, rank, world_size), len(calls())
        value = answer[2](*arguments)
        if program == "average_gradients":
            value = [p.grad for p in arguments[0]]
        return {"value": _plain(value), "collectives": calls()[called:]}

    def judge(outputs, world_size, seed):
        right, mistakes = expected(program, seed, world_size)
        for output in outputs:
            if "wrong" in output:
                return output["wrong"]
        values = [output["value"] for output in outputs]
        if all(_same(value, right) for value in values):
            return same_calls(outputs)
        for message, wanted in mistakes.items():
            wrong = wanted if _by_rank(wanted, right) else [wanted] * world_size
            if all(_same(*pair) for pair in zip(values, wrong, strict=True)):
                return f"{program}, mended: {message}"
        rank = next(rank for rank, value in enumerate(values) if not _same(value, right))
        return f"{program}, mended: rank {rank} comes to {_say(values[rank])}, not {_say(right)}."

    return run, judge


def _by_rank(wanted, right) -> bool:
    """Say whether a wrong value is a list with one for each rank."""
    if not isinstance(wanted, list) or not wanted:
        return False
    return not isinstance(right, list) or isinstance(wanted[0], list)


def _plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _plain(part) for name, part in value.items()}
    return value if isinstance(value, int | float | None) else f"{value!r:.80}"


def _same(value, right) -> bool:
    if isinstance(right, dict):
        alike = isinstance(value, dict) and set(value) == set(right)
        return alike and all(_same(value[name], right[name]) for name in right)
    if isinstance(right, list):
        alike = isinstance(value, list) and len(value) == len(right)
        return alike and all(_same(*pair) for pair in zip(value, right, strict=True))
    if not isinstance(value, int | float | torch.Tensor):
        return False
    value, right = (torch.as_tensor(number, dtype=torch.float64) for number in (value, right))
    return value.numel() == right.numel() and off(value.reshape(right.shape), right) is None


def _say(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_say(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_say, value)) + "]"
    if isinstance(value, torch.Tensor):
        return _say(value.tolist())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


STUCK = (
    "Likely: the mended program still has a collective that not all ranks call, or not equally "
    "often, or with another shape."
)
GRADIENTS = (
    "Likely: a rank without a gradient leaves out the all_reduce. It has to bring zeros: "
    "torch.zeros_like(p)."
)


def _cases(program):
    stuck = GRADIENTS if program == "average_gradients" else STUCK
    yield Case(f"{program}: rank and line", 1, *_diagnosis(program), (1,), stuck)
    yield Case(f"{program}: mended", 2, *_mended(program), (3, 2, 4, 1), stuck)


EXERCISE = Exercise(
    "11_find_the_hang",
    "find_the_hang",
    ("program",),
    tuple(case for program in PROGRAMS for case in _cases(program)),
)
