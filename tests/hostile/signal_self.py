"""Kills itself."""

import os
import signal


def accumulate_window(model, window):
    os.kill(os.getpid(), signal.SIGKILL)
