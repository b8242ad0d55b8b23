"""Backtracks for ever in the regular-expression engine."""

import re


def accumulate_window(model, window):
    return bool(re.match(r"(a+)+$", "a" * 60 + "b"))
