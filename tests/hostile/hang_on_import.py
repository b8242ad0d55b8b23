"""Never ends before there is a function."""

FOREVER = list(iter(int, 1))


def accumulate_window(model, window):
    return FOREVER
