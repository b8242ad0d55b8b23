"""Kills the process that would end it, then never ends."""

import os
import signal


def accumulate_window(model, window):
    os.kill(os.getppid(), signal.SIGKILL)
    while True:
        pass
