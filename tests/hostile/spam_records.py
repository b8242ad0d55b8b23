"""Sends records for ever."""


def accumulate_window(model, window):
    from ddp_course import report

    while True:
        report(text="x" * 10_000)
