"""Takes all memory at once, in PyTorch."""

import torch


def accumulate_window(model, window):
    return torch.ones(1 << 40).sum()
