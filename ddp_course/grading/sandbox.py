"""What holds a submission in: Landlock (Linux 5.13 and later) for files and signals, and limits.

A sandboxed process, and all that it starts, reads Python, its packages and this package without
the judges in `exercises`; it writes in one folder only; from Linux 6.12 on it sends signals to its
own kind only, and it can never look into the memory of a process outside. No privilege is needed,
none can lift it. See the kernel's documentation, "Landlock: unprivileged access control".
"""

import contextlib
import ctypes
import os
import resource
import signal
import site
import stat
import struct
import sys
import sysconfig
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
_SITES = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}
HIDDEN = {  # the judges, with the expected values: of this package and of one that is installed
    (folder / "ddp_course" / "grading" / "exercises").resolve()
    for folder in (PACKAGE.parent, *map(Path, _SITES))
}
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/dev")

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every processor
_EXECUTE, _WRITE, _READ, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_LOOK = _EXECUTE | _READ | _READ_DIR
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 8, 36, 38
_CAP_DAC_READ_SEARCH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """Return the version of Landlock that this kernel has; 0: none."""
    if sys.platform != "linux":
        return 0
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def enter(folder: str) -> bool:
    """Put this process, and all it will start, into the sandbox; return whether there is one.

    `folder` is the one that stays writable.
    """
    version = landlock_version()
    if not version:
        return False
    rights = (1 << (13 + (version >= 2) + (version >= 3))) - 1 | (_IOCTL if version >= 5 else 0)
    scope = 0b11 if version >= 6 else 0  # abstract sockets and signals
    attributes = struct.pack("<QQQ", rights, 0, scope)[: 24 if scope else 8]
    rules = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    if rules < 0:
        return False
    for path, allowed in _rules(folder, rights):
        _allow(rules, path, allowed & rights)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done = _libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return done


def _rules(folder: str, rights: int):
    """Yield (path, rights) for all that stays open."""
    yield Path(folder), rights
    yield Path("/dev/null"), _READ | _WRITE
    yield PACKAGE.parent, _READ_DIR  # names only: Python looks for the package there
    roots = {*SYSTEM, *_SITES, sysconfig.get_path("stdlib"), str(PACKAGE)}
    roots |= {sys.prefix, sys.base_prefix}
    for root in sorted(roots):
        for path in _around(Path(root).resolve()):
            yield path, _LOOK


def _around(path: Path):
    """Yield paths that cover all of `path`, except what is hidden."""
    if path in HIDDEN:
        return
    if any(path in hidden.parents for hidden in HIDDEN):
        with contextlib.suppress(OSError):
            for inner in path.iterdir():
                yield from _around(inner)
    else:
        yield path


def _allow(rules: int, path: Path, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _ON_FILES
    rule = struct.pack("<Qi", rights, fd)
    _libc.syscall(_ADD_RULE, rules, 1, rule, 0)
    os.close(fd)


def become(user: int) -> None:
    """Be a user without rights, from root.

    Where Landlock decides what can be read (`enter` comes next), it may still read what root may:
    Python can lie in a folder that is closed to others.
    """
    os.setgroups([])
    os.setresgid(user, user, user)
    keep = landlock_version() > 0
    _libc.prctl(_PR_SET_KEEPCAPS, keep, 0, 0, 0)
    os.setresuid(user, user, user)
    if keep:
        only = 1 << _CAP_DAC_READ_SEARCH
        header, sets = struct.pack("<Ii", 0x20080522, 0), struct.pack("<6I", only, only, 0, 0, 0, 0)
        if _libc.capset(header, sets):
            raise OSError(ctypes.get_errno(), "capset")


def die_with_parent() -> None:
    """End this process with the one that started it."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make what descendants leave behind children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def close_memory() -> None:
    """Keep processes of the same user from reading this one's memory and descriptors."""
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def open_memory() -> None:
    """Undo `close_memory`, for a child."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def limit(cpu_seconds: int, hard: bool = True) -> None:
    """Limit this process: processor time, memory, sizes and number of files, no core dumps."""
    _set(resource.RLIMIT_AS, _size() + (4 << 30), hard)
    if not hard:  # the children of this process set their own
        return
    _set(resource.RLIMIT_CPU, cpu_seconds, hard)
    _set(resource.RLIMIT_FSIZE, 64 << 20, hard)
    _set(resource.RLIMIT_CORE, 0, hard)
    _set(resource.RLIMIT_NOFILE, 512, hard)
    if os.getuid():
        _set(resource.RLIMIT_NPROC, _threads_of_user() + 256, hard)


def _set(what: int, value: int, hard: bool) -> None:
    most = resource.getrlimit(what)[1]
    value = value if most == resource.RLIM_INFINITY else min(value, most)
    resource.setrlimit(what, (value, value if hard else most))


def _threads_of_user() -> int:
    """Return how many threads this user has, in all processes: what RLIMIT_NPROC counts."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == os.getuid():
                count += len(os.listdir(process / "task"))
    return count


def _size() -> int:
    """Return the bytes of address space that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
