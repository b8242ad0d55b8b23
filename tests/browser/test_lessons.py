"""Lessons in a real JupyterLab: everything runs, every picture is described, Stop stops."""

import psutil
import pytest
from conftest import ROOT
from pages import IDLE, open_cells, open_notebook, ranks_of, run_all

BLOCKED = """
import torch, torch.distributed as dist
from ddp_course import launch
def worker():
    print("up", flush=True)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    while True:
        pass
launch(worker)
"""


LESSONS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
LIVE = ("00", "06", "09")  # these show a run while it trains
# What the sliders of an output change: its pictures and texts, not their own numbers.
SHOWN = """output => [...output.querySelectorAll('img, .widget-html-content')].map(
    e => e.src || e.innerHTML).join()"""


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_from_top_to_bottom(lab, page, screenshots, lesson):
    open_notebook(page, lab, f"notebooks/{lesson}.ipynb")
    run_all(page)
    if lesson.startswith(LIVE):
        page.locator("progress").first.wait_for(state="attached", timeout=120_000)
        # it is replaced five times a second: too quick to be held by the driver
        page.evaluate("document.querySelector('progress')?.scrollIntoView({block: 'center'})")
        page.screenshot(path=screenshots / f"{lesson}_live.png")
    page.wait_for_function(IDLE, timeout=240_000)
    assert page.errors == []
    assert page.locator(".jp-CodeCell").count() > 10
    assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
    alts = page.eval_on_selector_all(".jp-OutputArea img", "images => images.map(i => i.alt)")
    assert alts and all(len(alt) > 40 for alt in alts)
    move_sliders(page)
    page.screenshot(path=screenshots / f"{lesson}.png")
    assert page.errors == [] and not ranks_of(lab)


def move_sliders(page):
    """Move the sliders of each output with the keyboard, and see what belongs to them change."""
    for output in page.query_selector_all(".jp-OutputArea-child:has([role=slider])"):
        before = output.evaluate(SHOWN)
        if not before or "predict" in before.lower():  # only notes a number
            continue
        for slider in output.query_selector_all("[role=slider]"):
            was = slider.get_attribute("aria-valuenow")
            slider.scroll_into_view_if_needed()
            slider.focus()
            at_end = was == slider.get_attribute("aria-valuemax")
            page.keyboard.press("ArrowLeft" if at_end else "ArrowRight")
            moved = "([slider, was]) => slider.getAttribute('aria-valuenow') != was"
            page.wait_for_function(moved, arg=[slider, was])
        changed = f"([output, before]) => ({SHOWN})(output) != before"
        page.wait_for_function(changed, arg=[output, before])


def test_the_stop_button_ends_the_ranks_and_the_kernel_goes_on(lab, page, screenshots):
    open_cells(page, lab, "stop.ipynb", BLOCKED, "print('still', 'here')")
    first, second = page.locator(".jp-CodeCell").all()
    first.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.get_by_text("[rank 1] up").wait_for()
    ranks = ranks_of(lab)
    assert len(ranks) == 3  # a guardian and two ranks
    page.locator(
        '[data-command="notebook:interrupt-kernel"] button, [title^="Interrupt"]'
    ).first.click()
    page.get_by_text("KeyboardInterrupt").first.wait_for()
    page.screenshot(path=screenshots / "stop.png")
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    second.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.get_by_text("still here").wait_for()
