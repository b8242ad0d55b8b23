"""Gives the right answer, and leaves a daemon in a session of its own."""

import os
import time

import torch.nn.functional as F


def right(model, window):
    samples, total = sum(len(y) for _, y in window), 0.0
    for x, y in window:
        loss = F.cross_entropy(model(x), y, reduction="sum") / samples
        loss.backward()
        total += loss.item()
    return total


def accumulate_window(model, window):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.wait()
    return right(model, window)
