"""Never ends, and catches all that could end it."""


def accumulate_window(model, window):
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue
