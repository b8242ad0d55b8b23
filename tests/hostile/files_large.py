"""Fills the disk with one file."""


def accumulate_window(model, window):
    with open("large", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))
