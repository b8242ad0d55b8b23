"""Raises an error whose text is huge and full of control characters."""


def accumulate_window(model, window):
    raise ValueError("\x1b[2J\x00<script>alert(1)</script>\udc80" * 10**6)
