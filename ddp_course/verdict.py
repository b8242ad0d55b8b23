"""From what is known of each rank to the error that a student sees: who, where, why, what to do."""

from . import errors, flight


def rank_error(state) -> errors.RankError:
    """Return the error of a run in which at least one rank failed."""

    def order(number):  # a rank that only lost its peer comes after one with a reason of its own
        return _is_consequence(state, number), state.failures[number]["moment"]

    first = min(state.failures, key=order)
    trace = _reason(state, first)
    others = {number: situation(state, number) for number in range(state.nproc) if number != first}
    same = [number for number in others if number in state.failures and _reason(state, number) == trace]
    everyone = same and len(same) == state.nproc - 1
    who = "the same error on all ranks" if everyone else f"rank {first} failed first"
    message = f"{who}.\n\n{trace}"
    if rest := [f"  rank {number} {text}" for number, text in others.items() if number not in same]:
        message += "\n\nThe other ranks:\n" + "\n".join(rest)
    message += _advice(state, first)
    return errors.RankError(
        message, first, trace, others, output=output(state), stacks=stacks(state), collectives=logs(state)
    )


def hang_error(state, headline: str) -> errors.HangError:
    """Return the error of a run that did not end."""
    lines = [headline] + [f"  rank {number} {situation(state, number)}" for number in range(state.nproc)]
    if advice := _advice(state) or _absent(state):
        lines.append(advice.strip())
    return errors.HangError(
        "\n".join(lines), output=output(state), stacks=stacks(state), collectives=logs(state)
    )


def situation(state, number: int) -> str:
    """Say in one line what a rank does, or did last."""
    if number in state.values:
        return "had returned"
    if number in state.failures:
        if _is_consequence(state, number):
            return "then lost its connection to a rank that had gone"
        return "failed too: " + errors.first_line(_reason(state, number))
    if number not in state.whereabouts:
        return "gave no answer: it is busy in C or C++ code"
    where = state.whereabouts[number]
    if name := waits(where):
        return f"waits in {name} ({errors.own_place(where['frames'])})"
    return errors.where(where["frames"])


def waits(where: dict) -> str | None:
    """Return the collective that a rank waits in, by its record or else its stack; None if in none."""
    called = errors.collective(where["frames"])
    collective = flight.pending(where["log"])
    if collective and (called or errors.in_backward(where["frames"])):
        return str(collective)
    return called


def output(state) -> list[tuple[int, str]]:
    """Return what ranks printed, as (rank, line), rank by rank."""
    return [(number, line) for number, output in enumerate(state.outputs) for line in output.lines]


def stacks(state) -> list[str]:
    """Return a Python stack per rank: where it raised, crashed or is; "" for a rank that returned."""
    texts = []
    for number in range(state.nproc):
        failure, where = state.failures.get(number, {}), state.whereabouts.get(number, {})
        frames = failure["chain"][0]["frames"] if "chain" in failure else where.get("frames", ())
        texts.append(errors.format_stack(frames or _crash_frames(state, number)))
    return texts


def logs(state) -> list[list[flight.Collective]]:
    """Return the collectives that each rank called, oldest first, as far as they are known."""
    known = {number: failure["log"] for number, failure in state.failures.items() if "log" in failure}
    known |= {number: where["log"] for number, where in state.whereabouts.items()}
    return [known.get(number, []) for number in range(state.nproc)]


def _is_consequence(state, number) -> bool:
    failure = state.failures[number]
    return "chain" in failure and errors.is_consequence(failure["chain"])


def _reason(state, number) -> str:
    failure = state.failures[number]
    if "chain" in failure:
        return errors.format_chain(failure["chain"])
    reason = f"The process of rank {number} {errors.exit_reason(failure['exit'])}."
    if frames := _crash_frames(state, number):
        reason = f"{errors.format_stack(frames)}{reason}"
    return reason


def _crash_frames(state, number):
    return errors.from_student(state.outputs[number].crash_frames)


def _advice(state, first: int | None = None) -> str:
    """Say where ranks disagree about the next collective, if they do; "" otherwise."""
    known = dict(enumerate(logs(state)))
    if first is not None and "log" not in state.failures[first]:
        known.pop(first)  # it died without telling
    found = flight.disagreement(known)
    if not found:
        return ""
    named = ", ".join(f"rank {number} {collective}" for number, collective in sorted(found.items()))
    count = next(iter(found.values())).number
    return f"\n\nThe ranks disagree about collective number {count}: {named}."


def _absent(state) -> str:
    """Say which ranks never came to the collective that others wait in; "" if none is missed."""
    waiting = {number: name for number, where in state.whereabouts.items() if (name := waits(where))}
    waiting = {number: name for number, name in waiting.items() if number not in state.values}
    absent = [number for number in range(state.nproc) if number not in waiting]
    if not waiting or not absent:
        return ""
    names = " and ".join(sorted(set(waiting.values())))
    return f"{names} needs every rank: {', '.join(f'rank {number}' for number in absent)} never called it."
