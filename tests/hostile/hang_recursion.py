"""Recurses in C until its stack is full."""


def accumulate_window(model, window):
    nested = []
    for _ in range(10**6):
        nested = [nested]
    return repr(nested)
