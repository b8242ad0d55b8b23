"""Waits for a lock that it holds."""

import threading


def accumulate_window(model, window):
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()
