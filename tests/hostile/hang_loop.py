"""Never ends."""


def accumulate_window(model, window):
    while True:
        pass
