"""From what is known of each rank to the error that a student sees: who, where, why, what to do."""

from . import errors, flight

CAN_NEVER_GO_ON = "the ranks wait for one another and can never go on:"


def rank_error(state) -> errors.RankError:
    """Return the error of a run in which at least one rank failed."""

    def order(number):  # a rank that only lost its peer comes after one with a reason of its own
        return _is_consequence(state, number), state.failures[number]["moment"]

    first = min(state.failures, key=order)
    trace = _reason(state, first)
    others = {number: situation(state, number) for number in range(state.nproc) if number != first}
    same = [
        n for n in others if n in state.failures and _headline(state, n) == _headline(state, first)
    ]
    everyone = same and len(same) == state.nproc - 1
    who = "the same error on all ranks" if everyone else f"rank {first} failed first"
    message = f"{who}.\n\n{trace}"
    if rest := [f"  rank {number} {text}" for number, text in others.items() if number not in same]:
        message += "\n\nThe other ranks:\n" + "\n".join(rest)
    message += _advice(state, first)
    return errors.RankError(
        message,
        first,
        trace,
        others,
        output=output(state),
        stacks=stacks(state),
        collectives=logs(state),
    )


def nothing_known(state, message: str) -> errors.RankError:
    """Return the error of a run whose ranks are all gone without a word."""
    return errors.RankError(
        message, None, "", {}, output=output(state), stacks=stacks(state), collectives=logs(state)
    )


def hang_error(state, headline: str) -> errors.HangError:
    """Return the error of a run that did not end."""
    lines = [headline] + [
        f"  rank {number} {situation(state, number)}" for number in range(state.nproc)
    ]
    if advice := _advice(state) or _absent(state) or _same_collective(state):
        lines.append(advice.strip())
    return errors.HangError(
        "\n".join(lines), output=output(state), stacks=stacks(state), collectives=logs(state)
    )


def order_error(state) -> errors.OrderError | None:
    """Return the error of a run that ended well, though by chance; None if all was in order.

    PyTorch matches the n-th collective of one rank with the n-th of the others. If they come from
    different lines, results that look right are sums of different things.
    """

    def call(collective):
        return collective.signature, errors.own_place(collective.frames)

    found = flight.disagreement(dict(enumerate(logs(state))), key=call)
    if not found:
        return None
    lines = [f"collective number {next(iter(found.values())).number} is not the same on all ranks:"]
    lines += [f"  rank {n} {c} ({errors.own_place(c.frames)})" for n, c in sorted(found.items())]
    return errors.OrderError(
        "\n".join(lines), output=output(state), stacks=stacks(state), collectives=logs(state)
    )


def situation(state, number: int) -> str:
    """Say in one line what a rank does, or did last."""
    if number in state.values:
        return "had returned"
    if number in state.failures:
        if _is_consequence(state, number):
            return "then lost its connection to a rank that had gone" + _last_call(state, number)
        return "failed too: " + errors.first_line(_headline(state, number))
    if number not in state.whereabouts:
        frames = crash_frames(state, number)
        busy = "in C or C++ code that lets no other thread run"
        return f"{errors.where(frames)}, {busy}" if frames else "gave no answer"
    where = state.whereabouts[number]
    if name := waits(where):
        return f"waits in {name} ({errors.own_place(where['frames'])})"
    return errors.where(where["frames"])


def waits(where: dict) -> str | None:
    """Return the collective that a rank waits for, by its record or its stack, or None."""
    collective = flight.pending(where["log"])
    return str(collective) if collective else errors.collective(where["frames"])


def never_go_on(state) -> bool:
    """Return whether ranks that all wait, or have returned, can never go on.

    They may if all that wait are in one and the same collective: it can be just slow.
    """
    places = [
        flight.pending(state.whereabouts[number]["log"]) for number in sorted(state.unfinished)
    ]
    if None in places:  # point to point is not recorded: somebody must send what somebody receives
        names = {waits(state.whereabouts[number]) for number in state.unfinished}
        return names in ({"recv"}, {"send"}) or bool(state.values)
    same = len({(place.group, place.number, place.signature) for place in places}) == 1
    group, count = places[0].group, places[0].number
    left = [state.whereabouts[number]["log"] for number in state.values]
    came = all(any((c.group, c.number) == (group, count) for c in log) for log in left)
    return not (same and came)


def output(state) -> list[tuple[int, str]]:
    """Return what ranks printed, as (rank, line), rank by rank."""
    return [(number, line) for number, output in enumerate(state.outputs) for line in output.lines]


def stacks(state) -> list[str]:
    """Return a stack per rank: where it raised, crashed or is; "" where it has returned."""
    texts = []
    for number in range(state.nproc):
        failure, where = state.failures.get(number, {}), state.whereabouts.get(number, {})
        frames = failure["chain"][0]["frames"] if "chain" in failure else where.get("frames", ())
        texts.append(errors.format_stack(frames or crash_frames(state, number)))
    return texts


def logs(state) -> list[list[flight.Collective]]:
    """Return the collectives that each rank called, oldest first, as far as they are known."""
    known = {
        number: failure["log"] for number, failure in state.failures.items() if "log" in failure
    }
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
    crashed = failure["exit"] < 0 and failure["exit"] != -9
    if crashed and (frames := crash_frames(state, number)):
        reason = f"{errors.format_stack(frames)}{reason}"
    return reason


def _headline(state, number) -> str:
    """Return the first line of what a rank raised, or how its process ended."""
    failure = state.failures[number]
    if "chain" in failure:
        return failure["chain"][0]["text"].split("\n")[0]
    return f"its process {errors.exit_reason(failure['exit'])}"


def _last_call(state, number) -> str:
    calls, frames = logs(state)[number], state.failures[number]["chain"][0]["frames"]
    return f", in {calls[-1]} ({errors.own_place(frames)})" if calls else ""


def crash_frames(state, number):
    """Return the frames of the student's function in the stacks that faulthandler wrote."""
    threads = state.outputs[number].threads
    cut = [errors.from_student(frames) for frames in threads]
    return next((c for c, frames in zip(cut, threads, strict=True) if len(c) < len(frames)), [])


def _advice(state, first: int | None = None) -> str:
    """Say where ranks disagree about the next collective, if they do; "" otherwise."""
    known = dict(enumerate(logs(state)))
    if first is not None and "log" not in state.failures[first]:
        known.pop(first)  # it died without telling
    found = flight.disagreement(known)
    if not found:
        return _sizes_differ(state, first)
    named = ", ".join(f"rank {number} {collective}" for number, collective in sorted(found.items()))
    count = next(iter(found.values())).number
    return f"\n\nThe ranks disagree about collective number {count}: {named}."


def _same_collective(state) -> str:
    asked = state.unfinished & set(state.whereabouts)
    waiting = {waits(state.whereabouts[number]) for number in asked}
    if waiting == {"recv"}:
        return "All that are left want to receive, and none sends."
    if waiting == {"send"}:
        return "All that are left want to send, and none receives."
    if len(asked) == state.nproc and len(waiting) == 1 and None not in waiting:
        return "All are in the same collective: do they agree on its source, destination and group?"
    return ""


def _sizes_differ(state, first) -> str:
    said = () if first is None else state.outputs[first].lines
    if not any("Received data size" in line for line in said):
        return ""
    return (
        f"\n\nRank {first} received more or fewer bytes than its own tensor has: in this "
        "collective the ranks' tensors differ in shape or type."
    )


def interrupted(state) -> str:
    """Return what to show after the stop button: where the ranks were."""
    lines = ["stopped; all ranks are gone. When you stopped them:"]
    lines += [f"  rank {number} {situation(state, number)}" for number in range(state.nproc)]
    return "\n".join(lines)


def _absent(state) -> str:
    """Say which ranks never came to the collective that others wait in; "" if none is missed."""
    asked = state.unfinished & set(state.whereabouts)
    waiting = {number: name for number in asked if (name := waits(state.whereabouts[number]))}
    absent = [number for number in range(state.nproc) if number not in waiting]
    if not waiting or not absent:
        return ""
    kinds, never = set(waiting.values()), ", ".join(f"rank {number}" for number in absent)
    for name, other in (("recv", "send"), ("send", "recv")):
        if kinds == {name}:
            return f"A {name} needs a {other} on the other rank: {never} has none under way."
    return f"{' and '.join(sorted(kinds))} needs every rank: {never} never called it."
