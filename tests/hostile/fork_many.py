"""Starts more processes than any exercise needs, then never ends."""

import os
import time


def accumulate_window(model, window):
    for _ in range(200):
        if os.fork() == 0:
            time.sleep(3600)
    time.sleep(3600)
