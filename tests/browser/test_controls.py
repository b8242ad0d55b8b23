"""The control panel, worked as a person would: with buttons, sliders and the keyboard."""

import psutil
from pages import open_cells, ranks_of, run_all

PANEL = """
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from ddp_course import controls, data, dials, models, report

def worker():
    torch.manual_seed(0)
    model = DistributedDataParallel(models.MLP(width=64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = data.shard(data.digits()[0], 32)
    for step in range(10**6):
        if step % len(loader) == 0:
            batches = iter(loader)
        x, y = next(batches)
        optimizer.param_groups[0]["lr"] = dials(learning_rate=0.1).learning_rate
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step=step, loss=loss, local_loss=loss, rate=optimizer.param_groups[0]["lr"])

def draw(records):
    from ddp_course import live
    return f"<p>rate {records[-1]['rate']:.3f}</p>" + live.panels(records)

panel = controls.Panel(
    worker, dials={"learning_rate": (0.0, 0.1, 1.0)}, draw=draw, title="Two ranks train", harm=True
)
panel
"""


def test_start_turn_pause_kill_and_stop(lab, page, screenshots):
    def press(name):
        return page.locator(".widget-button", has_text=name)

    open_cells(page, lab, "panel.ipynb", PANEL)
    run_all(page)
    page.get_by_text("ready: press Start").wait_for()
    press("Start").focus()
    page.keyboard.press("Space")
    page.get_by_text("rate 0.100").wait_for()
    ranks = ranks_of(lab)
    assert len(ranks) == 3  # a guardian and two ranks

    slider = page.get_by_role("slider").first
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.get_by_text("rate 0.150").wait_for()

    pause = press("Pause / go on")
    pause.click()
    page.get_by_text("paused").wait_for()
    assert any(rank.status() == psutil.STATUS_STOPPED for rank in ranks)
    pause.click()
    page.get_by_text("running").wait_for()
    page.screenshot(path=screenshots / "panel.png")

    press("Kill it").click()
    page.get_by_text("rank 1 failed first").wait_for()
    page.screenshot(path=screenshots / "panel_killed.png")
    _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive

    press("Start").click()
    page.get_by_text("running").wait_for()
    press("Stop").click()
    page.get_by_text("stopped: all ranks are gone").wait_for()
    assert not ranks_of(lab)
    assert page.errors == []


def test_the_explorer_keeps_what_is_typed(page, lab, screenshots):
    """The browser sends back what the slider was set to; the number must not follow."""
    open_cells(page, lab, "formats.ipynb", "from ddp_course import formats\nformats.explorer(1.0)")
    run_all(page, wait=False)  # too quick for its star to be seen
    number = page.locator(".widget-text input")
    number.wait_for()
    assert float(number.input_value()) == 1.0
    for text in ("0.1", "0.000001", "-3"):
        number.fill(text)
        number.press("Enter")
        page.get_by_text(f"{float(text):.9g}", exact=False).first.wait_for()
        assert float(number.input_value()) == float(text)
    page.locator("[role=slider]").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("document.querySelector('.widget-text input').value != '-3'")
    page.screenshot(path=screenshots / "formats.png")
    assert page.errors == []
