"""The control panel without a browser: what it shows and which run it ends. See tests/browser."""

import threading

import pytest
import torch.distributed as dist

from ddp_course import background, controls, report


def for_ever():
    """Until somebody ends it."""
    while True:
        dist.barrier()


def short():
    report(step=0, loss=1.0)


@pytest.fixture(autouse=True)
def nothing_goes_on():
    yield
    background.stop_latest()


def said(panel) -> str:
    return panel._status.value


def start(panel) -> threading.Thread:
    """Press Start; return the thread that will tell how this run ended."""
    before = set(threading.enumerate())
    panel.start()
    (follower,) = (t for t in set(threading.enumerate()) - before if t.name != "background run")
    return follower


def test_a_run_that_was_replaced_does_not_speak_over_the_next():
    panel = controls.Panel(for_ever)
    first, run = start(panel), panel.run
    start(panel)
    first.join(30)
    assert not first.is_alive() and not run.running
    assert panel.run.running and "stopped" not in said(panel)
    panel.stop()
    assert not panel.run.running


def test_a_new_panel_ends_the_run_of_the_one_before():
    old = controls.Panel(for_ever)
    start(old)
    new = controls.Panel(for_ever)
    assert not old.run.running and "ready" in said(new)


def test_choosing_another_program_ends_the_run_and_shows_the_new_one():
    panel = controls.Panel({"for ever": for_ever, "short": short}, listing=True)
    (listing,) = panel._listing
    assert "dist.barrier()" in listing.value
    start(panel)
    run = panel.run
    (choice,) = (part for part in panel.children if hasattr(part, "options"))
    choice.value = "short"
    assert not run.running and "ready" in said(panel)
    assert "dist.barrier()" not in listing.value and "report(step=0" in listing.value
    start(panel).join(60)
    assert "done" in said(panel)


def test_lines_are_numbered_as_errors_name_them():
    panel = controls.Panel(short, listing=True)
    number = short.__code__.co_firstlineno
    assert f"{number:3}  def short():" in panel._listing[0].value
