"""Ends with SystemExit, which no `except Exception` sees."""

import sys


def accumulate_window(model, window):
    sys.exit(0)
