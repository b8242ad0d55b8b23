"""`ddp-course doctor --cluster`: whether several machines can train together, before they try.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint FIRST:29400 \\
        -m ddp_course doctor --cluster

Each function judges facts handed to it; `examine` has the ranks tell and measure them (`hosts`).
"""

import itertools
import socket
from dataclasses import asdict
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous

from .doctor import Finding
from .hosts import (
    PATIENCE,
    Absent,
    Facts,
    exchange,
    facts,
    first_of_each,
    host_names,
    link,
    named,
    offset,
    unreached,
)
from .process_group import Rank, process_group, this_rank

CLOCKS = 1.0  # seconds that clocks may differ: logs and the times of files stay in order


def main() -> int:
    """Look, and let rank 0 print what was found; 0 if training can start, 1 on rank 0 if not."""
    me = this_rank()
    if me.world_size == 1:
        print("doctor --cluster looks at several ranks: start it with torchrun on every machine.")
        return 2
    findings = examine(me)
    if me.rank == 0:
        print(*findings, sep="\n", flush=True)
    return int(me.rank == 0 and any(finding.level == "FAIL" for finding in findings))


def examine(me: Rank) -> list[Finding]:
    """Return the findings, the same on all ranks, which must all call it."""
    patience = timedelta(seconds=PATIENCE)
    store = next(rendezvous("env://", me.rank, me.world_size, timeout=patience))[0]
    with socket.create_server(("", 0), backlog=me.world_size) as server:
        mine = facts(me, server.getsockname()[1])
        try:
            told = named([Facts(**fact) for fact in exchange(store, me, "facts", asdict(mine))])
        except Absent as error:
            return [Finding("Ranks", str(error), "FAIL", "look at that machine's own output")]
        offsets = exchange(store, me, "clock", offset(store, me))
        missed = exchange(store, me, "reach", unreached(mine, told))
    findings = [world(told), *versions(told), *digests(told), clocks(told, offsets)]
    findings += [*addresses(told), *reach(told, missed)]
    if not any(finding.level == "FAIL" for finding in findings):
        findings += _group(told)
    store.set(f"cluster/done/{me.rank}", "")
    if me.rank == 0:  # the store may be in this process
        store.wait([f"cluster/done/{rank}" for rank in range(me.world_size)])
    return findings


# what is made of it


def world(told: list[Facts]) -> Finding:
    """How many ranks there are, and where."""
    counts = {host: sum(fact.host == host for fact in told) for host in host_names(told)}
    named = ", ".join(f"{host} ({count})" for host, count in counts.items())
    backends = sorted({fact.backend for fact in told})
    text = f"{len(told)} ranks on {len(counts)} host(s): {named}; backend {' and '.join(backends)}"
    if len(backends) > 1:
        fix = "give every machine as many ranks as it has GPUs, or pass the backend to all"
        return Finding("World", text, "FAIL", fix)
    return Finding("World", text)


def versions(told: list[Facts]) -> list[Finding]:
    """Whether all hosts run the same Python, PyTorch and course."""
    return _same(told, "Versions", "versions", "install the same constraints.txt on every machine")


def digests(told: list[Facts]) -> list[Finding]:
    """Whether all hosts have the same data: ranks index into it by number."""
    return _same(told, "Data", "digests", "copy the data, and the same Python, to every machine")


def clocks(told: list[Facts], offsets: list[float]) -> Finding:
    """How far the hosts' clocks are apart; `offsets`: of each rank's from rank 0's, in seconds."""
    apart = max(offsets) - min(offsets)
    if apart < CLOCKS:
        return Finding("Clocks", f"at most {max(1e-3, apart):.3f} s apart")
    behind, ahead = (told[offsets.index(pick(offsets))].host for pick in (min, max))
    text = f"that of {ahead} is {apart:.1f} s ahead of that of {behind}"
    return Finding("Clocks", text, "note", "let NTP set the clock of every machine")


def addresses(told: list[Facts]) -> list[Finding]:
    """Whether each host offers an address that others can use."""
    found, several = [], len(host_names(told)) > 1
    for fact in first_of_each(told) if several else []:
        have = ", ".join(f"{name} ({address})" for name, address in fact.interfaces.items())
        fix = f"export GLOO_SOCKET_IFNAME=NAME on {fact.host}; it has {have or 'no network'}"
        if not fact.address:
            text = f"{fact.host} has no interface of the name that GLOO_SOCKET_IFNAME says"
        elif fact.address.startswith("127."):
            text = f"{fact.host} offers {fact.address}, which only it can reach, to the others"
        else:
            continue
        found.append(Finding("Address", text, "FAIL", fix))
    return found


def reach(told: list[Facts], missed_by: list[list[int]]) -> list[Finding]:
    """Whether hosts can open connections; `missed_by`: by rank, the ranks that it did not reach."""
    missed = {
        (told[rank].host, told[other].host)
        for rank, others in enumerate(missed_by)
        for other in others
        if not told[other].address.startswith("127.")
    }
    if not missed and len(host_names(told)) > 1 and not addresses(told):
        return [Finding("Reach", "every host can open connections to every other")]
    place = {fact.host: fact.address for fact in first_of_each(told)}
    return [
        Finding(
            "Reach",
            f"{source} cannot open a connection to {target} ({place[target]})",
            "FAIL",
            f"let the firewall of {target} pass all TCP ports from {source}, or name the network "
            "that joins them in GLOO_SOCKET_IFNAME on both",
        )
        for source, target in sorted(missed)
    ]


def _same(told, name, field, fix) -> list[Finding]:
    findings, first = [], told[0]
    for what, value in getattr(first, field).items():
        others = [fact for fact in told if getattr(fact, field)[what] != value]
        if others:
            other = others[0]
            text = f"{what}: {value} on {first.host}, {getattr(other, field)[what]} on {other.host}"
            findings.append(Finding(name, text, "FAIL", fix))
    return findings or [Finding(name, f"{', '.join(getattr(first, field))}: the same everywhere")]


# the process group


def _group(told: list[Facts]) -> list[Finding]:
    """Set up the process group, and measure between every two hosts."""
    try:
        with process_group(timeout=PATIENCE):
            links = [_link(*pair) for pair in itertools.combinations(first_of_each(told), 2)]
    except RuntimeError as error:
        text = f"no process group: {str(error).splitlines()[0]}"
        fix = "the backend's log says more: TORCH_CPP_LOG_LEVEL=INFO, NCCL_DEBUG=INFO"
        return [Finding("Group", text, "FAIL", fix)]
    return [Finding("Group", "came up, and went down"), *links]


def _link(a: Facts, b: Facts) -> Finding:
    seconds, bits = link(a, b)
    text = f"{a.host} ⇄ {b.host}: {1e3 * seconds:.2f} ms, {bits / 1e9:.2f} Gbit/s one way"
    return Finding("Link", text)
