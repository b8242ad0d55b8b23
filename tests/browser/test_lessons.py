"""Lessons in a real JupyterLab: everything runs, every picture is described, Stop stops."""

import nbformat
import psutil
import pytest

IDLE = """() => document.querySelector('.jp-Notebook') &&
    ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""
BUSY = """() =>
    [...document.querySelectorAll('.jp-InputPrompt')].some(e => e.textContent.includes('*'))"""
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


def open_notebook(page, lab, path):
    address, _, _ = lab
    for _ in range(3):  # the server prints its address a moment before it listens
        try:
            page.goto(f"{address}/lab/tree/{path}?reset")
            break
        except Exception as error:
            if "REFUSED" not in str(error):
                raise
    page.wait_for_selector(".jp-Notebook .jp-Cell")
    page.locator(".jp-Toolbar-kernelName", has_text="Python 3").first.wait_for()


def run_all(page):
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_text("Run All Cells", exact=True).click()
    page.wait_for_function(BUSY)


@pytest.mark.parametrize("lesson", ["00_start_here", "06_ddp_training_loop"])
def test_a_lesson_runs_from_top_to_bottom(lab, page, screenshots, lesson):
    open_notebook(page, lab, f"notebooks/{lesson}.ipynb")
    run_all(page)
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
    page.screenshot(path=screenshots / f"{lesson}.png")


def test_the_stop_button_ends_the_ranks_and_the_kernel_goes_on(lab, page, screenshots):
    _, folder, process = lab
    cells = [nbformat.v4.new_code_cell(code) for code in (BLOCKED, "print('still', 'here')")]
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=spec), folder / "stop.ipynb")
    open_notebook(page, lab, "stop.ipynb")
    first, second = page.locator(".jp-CodeCell").all()
    first.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    page.get_by_text("[rank 1] up").wait_for()
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if in_run(p)]
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


def in_run(process) -> bool:
    """Whether this is a guardian or a rank: a copy of the fork server, the kernel's child."""
    try:
        command = process.cmdline()
        return "fork_server" in " ".join(command) and process.parent().cmdline() == command
    except psutil.NoSuchProcess:
        return False
