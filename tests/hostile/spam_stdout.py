"""Prints for ever."""


def accumulate_window(model, window):
    while True:
        print("x" * 1000)
