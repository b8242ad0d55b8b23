"""Returns something nested too deeply to be read."""


def accumulate_window(model, window):
    nested = []
    for _ in range(500):
        nested = [nested]
    return nested
