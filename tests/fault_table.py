"""Measure what a student sees of each fault, how soon, and what is left, beside other launchers.

    python tests/fault_table.py          this course in all cases; torch's spawn and, if there,
                                         accelerate's notebook_launcher, for the last of two ranks
    python tests/fault_table.py --all    the others in all cases as well: takes hours
    python tests/fault_table.py --only raises --launchers course

Everything goes through live Jupyter kernels. Writes fault_table.md and fault_table.json into the
current folder (or --out FOLDER). Seconds are counted from the moment of the fault, which ranks
write to a file (all processes of a machine share the clock), to the end of the cell. Where nothing
is shown within --patience seconds, the stop button is pressed; what it leaves then is killed.
Faults of which nobody can know before the time is up get a time-out of 1 s here.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import queue
import re
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from faults import CASES, IMPORTS, Fault
from kernels import CellError, Kernel

TITLES = {
    "course": "this course",
    "spawn": "torch.multiprocessing.spawn",
    "accelerate": "accelerate.notebook_launcher",
}
MARK = """
def mark():
    if not vars(mark):
        mark.moment = time.monotonic()
        with open({path!r}, "a") as file:
            file.write(f"{{mark.moment}}\\n")
"""
START = """
def started(rank, nproc, port, bad):
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(nproc))
    os.environ.update(place | os.environ)  # accelerate has set them
    dist.init_process_group("gloo")
    worker(bad)
"""
BLOCKED = [
    Fault(
        "all ranks wait in gloo",
        "def worker(bad):\n"
        "    rank = dist.get_rank()\n"
        "    dist.recv(torch.ones(1)) if rank else dist.barrier()  # fault\n",
    ),
    Fault(
        "all ranks are in a busy loop that ignores signals",
        "def worker(bad):\n"
        "    for number in (signal.SIGTERM, signal.SIGINT):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "    while True:\n"
        "        bad += 1  # fault\n",
    ),
]


def cell(launcher, fault, nproc, bad, folder) -> str:
    """Return the notebook cell that meets this fault with this launcher."""
    comment = "# fault" if fault.line("fault") else "# others"
    line = rf"^( +)(.*{comment})$"
    source = re.sub(line, r"\1mark()\n\1\2", fault.source, flags=re.MULTILINE)
    source = MARK.format(path=str(folder / "moments")) + source
    if launcher == "course":
        call = f"launch(worker, {bad}, nproc={nproc}, timeout={fault.timeout})"
        return f"from ddp_course import launch\n{source}\n{call}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = f"{nproc}, {port!r}, {bad}"
    if launcher == "accelerate":
        how = f"num_processes={nproc}, use_port='{port}'"
        call = f"notebook_launcher(started, (0, {arguments}), {how})"
        return f"from accelerate import notebook_launcher\n{source}{START}{call}"
    (folder / "faulty.py").write_text(IMPORTS + source + START)  # spawn needs a module
    call = f"torch.multiprocessing.spawn(faulty.started, ({arguments}), nprocs={nproc})"
    return f"import importlib, faulty, torch.multiprocessing\nimportlib.reload(faulty)\n{call}"


class Bench:
    """One launcher in a kernel, which is replaced whenever it is of no more use."""

    def __init__(self, launcher, patience, folder):
        self.launcher, self.patience, self.folder = launcher, patience, folder
        self.kernel = None

    def start(self, fault, nproc, bad) -> str:
        """Send the cell, to a kernel that has launched before: imports belong to no fault."""
        if self.kernel is None:
            self.kernel = Kernel(cwd=str(self.folder))
            fine = Fault("none", "def worker(bad):\n    dist.barrier()  # fault\n")
            self.kernel.run(IMPORTS + cell(self.launcher, fine, 2, 0, self.folder))
        (self.folder / "moments").write_text("")
        self.code = cell(self.launcher, fault, nproc, bad, self.folder)
        return self.kernel.start(self.code)

    def moments(self) -> list[float]:
        return [float(line) for line in (self.folder / "moments").read_text().split()]

    def measure(self, fault, nproc, bad) -> dict:
        """Return what one fault looks like."""
        request = self.start(fault, nproc, bad)
        row = {"fault": fault.name, "world_size": nproc, "rank": bad, "launcher": self.launcher}
        row |= {"seconds": None, "seen": None, "line_shown": False}
        try:
            self.kernel.finish(request, timeout=self.patience)
            row["seen"] = "the cell ended as if all were well"
        except CellError as error:
            row["seconds"] = round(time.monotonic() - max(self.moments(), default=math.nan), 2)
            row["seen"] = first_line(error.brief)
            row["line_shown"] = self.shows_line(error.shown + error.printed)
        except queue.Empty:
            row["seconds_to_stop"] = self.stop(request)
        row["left"] = len(self.alive())
        if row["left"] or row["seen"] is None:
            row["left_when_killed"] = self.kill()
        return row

    def shows_line(self, text) -> bool:
        """Return whether the text names or shows the line at which the student's code is wrong."""
        code = self.code
        if self.launcher == "spawn":
            code = (self.folder / "faulty.py").read_text()
        lines = enumerate(code.splitlines(), 1)
        number, line = next((n, line) for n, line in lines if re.search("# (fault|others)$", line))
        return f", line {number}" in plain(text) or line.partition("  # ")[0].strip() in plain(text)

    def measure_blocked(self, fault, nproc) -> dict:
        """Return what the stop button and, in another kernel, SIGKILL leave of blocked ranks."""
        row = {"fault": fault.name, "world_size": nproc, "launcher": self.launcher}
        row["seconds_to_stop"] = self.stop(self.start_and_wait(fault, nproc))
        row["left"] = len(self.alive())
        self.kill()
        self.start_and_wait(fault, nproc)
        return row | {"left_when_killed": self.kill()}

    def start_and_wait(self, fault, nproc) -> str:
        request, deadline = self.start(fault, nproc, 0), time.monotonic() + 60
        while len(self.moments()) < nproc and time.monotonic() < deadline:
            time.sleep(0.02)
        return request

    def stop(self, request) -> float | None:
        """Press the stop button; return the seconds until the kernel is free, None if it is not."""
        began = time.monotonic()
        self.kernel.manager.interrupt_kernel()
        try:
            with contextlib.suppress(CellError):
                self.kernel.finish(request, timeout=self.patience)
        except queue.Empty:
            return None
        return round(time.monotonic() - began, 2)

    def alive(self) -> list[psutil.Process]:
        """Return what lives a second after it should have ended; Python's helpers do not count."""
        _, alive = psutil.wait_procs(self.kernel.left(), timeout=1)
        return [process for process in alive if "resource_tracker" not in command(process)]

    def kill(self) -> int:
        """Kill the kernel; return how many processes outlive it, and kill those as well."""
        if self.kernel is None:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.kernel.pid).kill()
        survivors = self.alive()
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.kernel.close()
        self.kernel = None
        return len(survivors)


def command(process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def plain(text) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def first_line(brief) -> str:
    """Return an error's name and the first line of its message that says anything."""
    name, _, message = plain(brief).partition(": ")
    line = next((line for line in message.splitlines() if re.search(r"\w", line)), "")
    return f"{name}: {line.strip()}" if line else name


# the report


def write(folder, rows, blocked, notes):
    """Write what was measured as fault_table.json and fault_table.md."""
    python, torch = platform.python_version(), importlib.metadata.version("torch")
    notes = [
        f"{platform.system()}, {os.cpu_count()} cores, Python {python}, torch {torch}.",
        *notes,
    ]
    everything = {"notes": notes, "faults": rows, "stop_and_kill": blocked}
    (folder / "fault_table.json").write_text(json.dumps(everything, indent=1) + "\n")
    launchers = [name for name in TITLES if any(row["launcher"] == name for row in rows)]
    text = [*notes, "", *summary(rows, launchers), "", *stop_and_kill(blocked)]
    text += ["", *details(rows, launchers)]
    (folder / "fault_table.md").write_text("\n".join(text) + "\n")


def table(head, body) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    ]


def seconds(value) -> str:
    return "–" if value is None else f"{value:.2f}"


def summary(rows, launchers):
    head = ["launcher", "cases", "with a message", "seconds, median and most"]
    head += ["with the student's line", "with processes left"]
    body = []
    for name in launchers:
        mine = [row for row in rows if row["launcher"] == name]
        times = [row["seconds"] for row in mine if row["seconds"] is not None] or [math.nan]
        line = [TITLES[name], len(mine), sum(row["seconds"] is not None for row in mine)]
        line += [f"{statistics.median(times):.2f}, {max(times):.2f}"]
        body.append(line + [sum(r["line_shown"] for r in mine), sum(r["left"] > 0 for r in mine)])
    return table(head, body)


def stop_and_kill(blocked):
    head = ["ranks are blocked", "launcher", "stop: seconds", "stop: left", "kernel killed: left"]
    body = [
        [row["fault"], TITLES[row["launcher"]], seconds(row["seconds_to_stop"])]
        + [row["left"], row["left_when_killed"]]
        for row in blocked
    ]
    return table(head, body)


def details(rows, launchers):
    head = ["fault", "ranks", "rank"]
    for name in launchers:
        head += [f"{TITLES[name]}: seconds", "seen", "left"]
    body = []
    for fault, nproc, bad in CASES:
        key = (fault.name, nproc, bad)
        here = [row for row in rows if (row["fault"], row["world_size"], row["rank"]) == key]
        line = [*key]
        for name in launchers:
            row = next((row for row in here if row["launcher"] == name), None)
            if row is None:
                line += ["", "", ""]
            else:
                line += [seconds(row["seconds"]), (row["seen"] or "nothing")[:70], row["left"]]
        if here:
            body.append(line)
    return table(head, body)


def run(launcher, cases, patience, done):
    """Measure a launcher; call `done(kind, row)` after each case."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(launcher, patience, Path(folder))
        try:
            for case in cases:
                done("fault", bench.measure(*case))
            for fault in BLOCKED:
                done("blocked", bench.measure_blocked(fault, 2))
        finally:
            bench.kill()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="other launchers in all cases as well")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    parser.add_argument("--launchers", nargs="+", choices=TITLES, default=list(TITLES))
    parser.add_argument("--patience", type=float, default=10, help="seconds to wait for others")
    parser.add_argument("--beside", type=Path, help="fault_table.json of other launchers")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the report")
    options = parser.parse_args()
    notes, rows = [], {"fault": [], "blocked": []}
    if options.beside:
        earlier = json.loads(options.beside.read_text())
        for kind, key in (("fault", "faults"), ("blocked", "stop_and_kill")):
            rows[kind] += [row for row in earlier[key] if row["launcher"] not in options.launchers]
    if "accelerate" in options.launchers and importlib.util.find_spec("accelerate") is None:
        options.launchers.remove("accelerate")
        notes.append("accelerate is not installed and so left out.")

    def done(kind, row):
        rows[kind].append(row)
        print(*row.values(), sep="  ", file=sys.stderr)
        write(options.out, rows["fault"], rows["blocked"], notes)

    cases = [case for case in CASES if options.only in case[0].name]
    few = [case for case in cases if case[1:] == (2, 1)]
    for launcher in options.launchers:
        if launcher == "course":
            run(launcher, cases, 200, done)
        else:
            run(launcher, cases if options.all else few, options.patience, done)


if __name__ == "__main__":
    main()
