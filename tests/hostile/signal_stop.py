"""Stops itself: it neither runs nor ends."""

import os
import signal


def accumulate_window(model, window):
    os.kill(os.getpid(), signal.SIGSTOP)
