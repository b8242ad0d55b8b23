"""Make .venv ready for the course. `make lab` and `make test` call it; a second call is instant.

Standard library only, in syntax that Python 3.6 reads: a Python too old for the course must get
as far as saying so.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
STATE = os.path.join(VENV, "ddp-course-state")  # INSTALLING, or key() of what was installed
INSTALLING = "installing"
LOG = os.path.join(ROOT, ".venv-setup.log")
SUPPORTED = ((3, 11), (3, 14))
NEEDED_GB = 2  # .venv with PyTorch's CPU build, and room to unpack it
INTERRUPTED = "Set-up interrupted: the next one will begin anew"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if name not in ("PIP_TARGET", "PIP_PREFIX", "PYTHONHOME", "PYTHONPATH")
}
ENVIRONMENT.update(PIP_USER="0", PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
ENVIRONMENT.update(PIP_RETRIES="3")  # with none, pip does not say that the network was the reason


class SetupError(Exception):
    """What stopped the set-up, in one line that also says what to do."""


def say(text):
    print(text, flush=True)


def key():
    """Fingerprint of what an installation follows from; the tools' settings are not part of it."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        project = file.read().split("\n[tool.")[0]
    with open(os.path.join(ROOT, "constraints.txt"), encoding="utf-8") as file:
        pins = file.read()
    return hashlib.sha256("\n".join((ROOT, project, pins)).encode()).hexdigest()


def state():
    """INSTALLING, the key of a finished installation, or "" (none, or not made by this script)."""
    try:
        with open(STATE) as file:
            return file.read()
    except OSError:
        return ""


def remember(text):
    with open(STATE, "w") as file:
        file.write(text)


def look_at(python, code):
    """An interpreter's (major, minor), and whether it can run `code`; None: it does not run."""
    code = "import sys; print(*sys.version_info[:2], flush=True); " + code
    process = subprocess.Popen(
        [python, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        universal_newlines=True,
    )
    output = process.communicate()[0].split()
    if len(output) != 2:
        return None
    return (int(output[0]), int(output[1])), process.returncode == 0


def supported(version):
    return SUPPORTED[0] <= version <= SUPPORTED[1]


def find_python():
    """The interpreter to make .venv with: this one if it will do, else another on PATH."""
    here = sys.version_info[:2]
    without_venv = None
    for name in [sys.executable] + ["python3.%d" % minor for minor in range(14, 10, -1)]:
        path = shutil.which(name)
        found = path and look_at(path, "from venv import main; from ensurepip import bootstrap")
        if found and supported(found[0]):
            if found[1]:
                return path, found[0]
            without_venv = without_venv or found[0]
    if without_venv:
        name = "python%d.%d" % without_venv
        raise SetupError(
            "%s has no venv module. Debian, Ubuntu: sudo apt install %s-venv" % (name, name)
        )
    raise SetupError(
        "Python %d.%d is too %s: the course needs Python 3.11 to 3.14. Install one, then, for"
        " example: make lab PYTHON=python3.12" % (here + ("old" if here < SUPPORTED[0] else "new",))
    )


def run(command):
    """Run a command with its output in the log, showing only the big steps; return its output."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ENVIRONMENT,
        cwd=ROOT,
        universal_newlines=True,
        encoding="utf-8",
        errors="replace",
    )
    lines = []
    with open(LOG, "a", encoding="utf-8") as log:
        log.write("$ %s\n" % " ".join(command))
        for line in process.stdout:
            log.write(line)
            log.flush()
            lines.append(line)
            big = re.match(r"\s*Downloading (\w+)\S* \(([\d.]+ GB|\d{2,}[\d.]* MB)\)", line)
            if big:
                say("  downloading %s (%s)" % big.groups())
            elif line.startswith("Installing collected packages"):
                say("  installing %d packages" % (line.count(",") + 1))
    return process.wait(), "".join(lines)


FULL = r"No space left on device|Disk quota exceeded|not enough space"
NETWORK = (
    r"name resolution|Name or service not known|getaddrinfo failed|nodename nor servname"
    r"|Failed to establish a new connection|NewConnectionError|ConnectTimeout|ReadTimeout"
    r"|Read timed out|Network is unreachable|No route to host|ProxyError|Connection refused"
)


def room():
    return (
        "PyTorch and JupyterLab need about %d GB (8 GB with CUDA) in %s, and room in %s (TMPDIR"
        " moves it)" % (NEEDED_GB, ROOT, tempfile.gettempdir())
    )


def explain(output):
    """The one line for a failed pip or venv: its likely cause, and what to do."""
    if re.search(FULL, output):
        return "the disk is full. " + room()
    if "CERTIFICATE_VERIFY_FAILED" in output:
        return "the network's certificate is not trusted. Behind a company proxy: set PIP_CERT"
    if re.search(NETWORK, output):
        return "no network: the packages could not be downloaded. Connect, then run the same again"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return "there is no %s for this Python and system" % missing.group(1)
    error = re.search(r"^ERROR: (.*)", output, re.MULTILINE) or re.search(r"Error: (.*)", output)
    return "the installation failed: %s" % (error.group(1) if error else "see the log")


def do(command):
    code, output = run(command)
    if code:
        raise SetupError("%s. Log: %s" % (explain(output), os.path.relpath(LOG)))


def has_nvidia_gpu():
    try:
        listed = subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False
    return b"GPU" in listed


def cpu_index(seconds=4):
    """The index of PyTorch's CPU build, where it spares gigabytes of CUDA and answers; else None.

    Only Linux's standard build carries CUDA. TORCH_CPU_INDEX names a mirror; empty: do not ask.
    """
    url = os.environ.get("TORCH_CPU_INDEX", CPU_INDEX)
    if not url or not sys.platform.startswith("linux") or has_nvidia_gpu():
        return None
    answers = []

    def ask():
        with contextlib.suppress(Exception):  # whatever it is, it is no answer
            answers.append(urllib.request.urlopen(url + "/torch/", timeout=seconds).getcode())

    thread = threading.Thread(target=ask, daemon=True)  # a name server may not keep to a time-out
    thread.start()
    thread.join(seconds)
    return url if answers == [200] else None


def create():
    """An empty .venv in place of whatever is there."""
    python, version = find_python()
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < NEEDED_GB:
        raise SetupError("only %.1f GB of disk are free. %s" % (free, room()))
    say("Creating .venv with Python %d.%d" % version)
    do([python, "-m", "venv", "--clear", VENV])
    remember(INSTALLING)


def install():
    """The course and everything it needs, in the pinned versions; already there: left alone."""
    pip = [PYTHON, "-m", "pip", "install", "--progress-bar", "off"]
    pins = ["-c", os.path.join(ROOT, "constraints.txt")]
    index = cpu_index()
    if index:
        say("No NVIDIA GPU here: taking PyTorch's CPU build")
        run(pip + pins + ["--no-deps", "--index-url", index, "torch"])  # if not: the next line's
    say("Installing PyTorch, JupyterLab and the course: minutes, the first time")
    do(pip + pins + ["-e", ROOT + "[test]"])


def try_imports():
    """Import what was installed: to pip a broken copy counts as installed."""
    return run([PYTHON, "-c", "import torch, sklearn, matplotlib, ipywidgets, jupyterlab, pytest"])


def usable():
    """Whether .venv is one to install into: not half made, of a Python that will do."""
    if state() == INSTALLING or not os.path.exists(PYTHON):
        return False
    found = look_at(PYTHON, "import pip")
    return bool(found) and supported(found[0]) and found[1]


def ready():
    return os.path.exists(PYTHON) and state() == key()


def make_ready():
    with open(LOG, "w"):
        pass
    fresh = not usable()
    if fresh:
        if os.path.isdir(VENV):
            say("Replacing .venv, which is incomplete")
        create()
    install()
    code, output = try_imports()
    if code and not fresh:
        say("Replacing .venv, which is broken")
        create()
        install()
        code, output = try_imports()
    if code:
        raise SetupError(
            "installed, but it does not run: %s. Log: %s"
            % (output.strip().splitlines()[-1], os.path.relpath(LOG))
        )
    remember(key())
    say("Ready")


def wait_for_turn():
    """Hold a lock on the repository's folder: two set-ups at once would spoil each other's."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("Another set-up is at work here; waiting for it")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        pass
    return folder


def main():
    if ready():
        return 0
    try:
        folder = wait_for_turn()
        if not ready():
            make_ready()
        if folder is not None:
            os.close(folder)
    except SetupError as error:
        print("Set-up stopped: %s" % error, file=sys.stderr)
        return 1
    except OSError as error:
        print("Set-up stopped: %s" % explain("OSError: %s" % error), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
