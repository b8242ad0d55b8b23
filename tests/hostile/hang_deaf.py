"""Ignores every signal that can be ignored, then never ends."""

import signal


def accumulate_window(model, window):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass
