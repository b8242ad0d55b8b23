"""Skips what needs more CUDA devices than there are, and says so."""

import pytest


def pytest_collection_modifyitems(items):
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    import torch

    have = torch.cuda.device_count()
    for item, mark in marked:
        need = mark.args[0] if mark.args else mark.kwargs.get("count", 1)
        if have < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA device(s), here: {have}"))
