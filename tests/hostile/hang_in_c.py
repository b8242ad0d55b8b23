"""Holds the interpreter lock in C: no other thread runs."""


def accumulate_window(model, window):
    return pow(3, 10**9) and 0.0
