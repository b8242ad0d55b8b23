"""Closes all descriptors, so that nothing can be heard of it, and never ends."""

import os


def accumulate_window(model, window):
    os.closerange(0, 1000)
    while True:
        pass
