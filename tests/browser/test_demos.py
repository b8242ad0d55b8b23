"""The demonstrations, as an instructor uses them: start, every control, stop."""

import psutil
import pytest
from pages import open_notebook, ranks_of, run_all

DEMOS = ["drift", "slow_link", "loss_scale"]


def button(page, name):
    return page.locator(".widget-button", has_text=name).first


def picture(page):
    """The content of the last HTML widget of the panel."""
    return page.locator(".ddp-course-panel .widget-html-content").last.inner_html()


def wait_for_another(page, before):
    page.wait_for_function(
        """before => [...document.querySelectorAll('.ddp-course-panel .widget-html-content')]
        .at(-1).innerHTML != before""",
        arg=before,
    )


def open_demo(page, lab, name):
    open_notebook(page, lab, f"notebooks/demos/{name}.ipynb")
    run_all(page, wait=False)  # a hidden cell shows no star
    button(page, "Start").wait_for()
    assert page.locator(".jp-InputArea-editor:visible").count() == 0  # no code in view


@pytest.mark.parametrize("name", DEMOS)
def test_start_every_control_and_stop(lab, page, screenshots, name):
    open_demo(page, lab, name)
    button(page, "Start").click()
    page.locator(".ddp-course-panel svg[aria-label]").first.wait_for()
    ranks = ranks_of(lab)
    assert len(ranks) == 3
    for slider in page.get_by_role("slider").all():
        before = picture(page)
        slider.focus()
        page.keyboard.press("ArrowRight")
        wait_for_another(page, before)
    for box in page.locator(".ddp-course-panel input[type=checkbox]").all():
        before = picture(page)
        box.focus()
        page.keyboard.press("Space")
        assert box.is_checked()
        wait_for_another(page, before)
    page.screenshot(path=screenshots / f"demo_{name}.png")
    button(page, "Stop").click()
    page.get_by_text("stopped: all ranks are gone").wait_for()
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive and page.errors == []


def test_the_hang_zoo_tells_who_where_and_what_for(lab, page, screenshots):
    open_demo(page, lab, "hang_zoo")
    programs = page.locator(".ddp-course-panel .widget-toggle-button")
    assert programs.count() == 5
    for number in range(5):
        programs.nth(number).focus()
        page.keyboard.press("Space")
        button(page, "Start").click()
        page.get_by_text("running").wait_for()
        page.get_by_text("failed", exact=False).first.wait_for()
        report = page.locator(".ddp-course-panel pre").inner_text()
        assert "Cell In[1], line" in report and ("never" in report or "failed first" in report)
        page.screenshot(path=screenshots / f"demo_hang_zoo_{number}.png")
    assert not ranks_of(lab) and page.errors == []


def test_the_ring_goes_round(lab, page, screenshots):
    open_demo(page, lab, "ring_all_reduce")
    button(page, "Start").click()
    page.locator(".ddp-course-panel img").wait_for()
    for number in range(1, 7):
        before = picture(page)
        button(page, "Next").click()
        wait_for_another(page, before)
        if number in (2, 6):
            page.screenshot(path=screenshots / f"demo_ring_{number}.png")
    alt = page.locator(".ddp-course-panel img").get_attribute("alt")
    assert "1,111" in alt or "1111" in alt
    assert page.errors == []
