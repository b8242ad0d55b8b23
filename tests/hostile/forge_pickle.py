"""Returns an object that runs code where it is unpickled."""

import os


class Bomb:
    def __reduce__(self):
        return os.system, ("touch unpickled",)


def accumulate_window(model, window):
    return Bomb()
