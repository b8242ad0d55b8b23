"""Waits in a collective that nobody else calls."""

import torch.distributed


def accumulate_window(model, window):
    store = torch.distributed.distributed_c10d._get_default_store()
    store.wait(["never"])
