"""The live view: what a notebook shows while ranks run, and what stays."""

import pytest
from kernels import Kernel

from ddp_course import live

RUN = """
from ddp_course import launch, live, train
settings = train.Settings(epochs=2, precision="fp16", init_scale=2.0**24)
with live.view() as view:
    run = launch(train.run, settings, on_record=view, timeout=60)
"""


def record(step, rank=0, **more):
    return {
        "rank": rank,
        "time": step / 10,
        "step": step,
        "steps": 100,
        "loss": 2.0 - step / 100,
    } | more


@pytest.fixture(scope="module")
def displayed():
    """The display messages of a cell that trains under a live view, in order."""
    kernel = Kernel()
    request, messages = kernel.start(RUN), []
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        assert message["msg_type"] != "error", message["content"]["evalue"]
        if message["msg_type"] in ("display_data", "update_display_data"):
            messages.append(message)
        if message["content"].get("execution_state") == "idle":
            break
    kernel.close()
    return messages


def test_there_is_one_output_and_it_is_redrawn(displayed):
    assert [message["msg_type"] for message in displayed].count("display_data") == 1
    assert len({message["content"]["transient"]["display_id"] for message in displayed}) == 1
    drawings = [m["content"]["data"]["text/html"] for m in displayed[1:-1]]
    assert drawings and all("<progress" in d and "samples/s" in d for d in drawings)
    assert all('role="img" aria-label="loss' in d for d in drawings)
    assert any("skipped" in d for d in drawings)


def test_a_still_picture_with_alternative_text_stays(displayed):
    content = displayed[-1]["content"]
    assert "image/png" in content["data"]
    assert "The loss fell" in content["metadata"]["image/png"]["alt"]
    assert "skipped" in content["metadata"]["image/png"]["alt"]


class Clock:
    """A clock that a test sets, and that advances while drawing."""

    def __init__(self, drawing_takes):
        self.now, self._takes, self.drawings = 0.0, drawing_takes, 0

    def monotonic(self):
        return self.now

    def draw(self, *_, **how):
        self.now += self._takes
        self.drawings += 1


@pytest.mark.parametrize(("drawing_takes", "most"), [(0.001, 51), (0.05, 5)])
def test_redraws_are_at_most_five_a_second_and_two_percent(monkeypatch, drawing_takes, most):
    clock = Clock(drawing_takes)
    monkeypatch.setattr(live, "time", clock)
    view = live.View()
    monkeypatch.setattr(live, "panels", lambda records: "")
    monkeypatch.setattr("IPython.display.display", clock.draw)
    view._id = "as in a notebook"
    for step in range(10_000):  # ten seconds of records, a thousand a second
        clock.now = max(clock.now, step / 1000)
        view(record(step))
    assert 2 <= clock.drawings <= most


def test_in_a_terminal_it_moves_a_progress_bar(capsys):
    with live.view() as view:
        for step in range(50):
            view(record(step))
    states = capsys.readouterr().err.split("\r")
    assert len(states) < 8 and "50/100" in states[-1] and "loss 1.510" in states[-1]


def test_the_share_of_communication_is_drawn_for_each_rank():
    records = [
        record(step, rank, communication=0.25 + rank / 2) for step in (0, 1) for rank in (0, 1)
    ]
    assert "communication 50% of a step" in live.panels(records)


def test_records_with_a_loss_only_are_drawn_too():
    html = live.panels([record(step, rank) for step in range(3) for rank in (0, 1)])
    assert "loss 1.980" in html and "scale" not in html


def test_what_is_not_finite_is_drawn_at_the_edge():
    losses = (1.0, float("nan"), float("inf"), -float("inf"), 0.5)
    html = live.panels([record(k, loss=loss, loss_scale=0.0) for k, loss in enumerate(losses)])
    assert "nan" not in html.replace("loss nan", "") and 'points="' in html


def test_time_left_follows_from_the_steps_done():
    html = live.panels([record(0), record(50)])
    assert "step 51 of 100, 00:04 left" in html


def test_fields_may_come_and_go_and_numbers_be_huge(displayed):
    view = live.View()
    view._pace.draw = lambda drawing: drawing()
    view({"rank": 0, "step": 0, "loss": 1e308, "samples_per_s": 5})
    view({"rank": 0, "step": 1, "loss": -1e308})
    view({"rank": 0, "step": 2, "loss": float("inf"), "local_loss": -1e308})


@pytest.mark.parametrize("field", [{"loss": None}, {"loss": "x"}, {"loss_scale": None}])
def test_what_is_no_number_is_named(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"a live view draws numbers: {name} is"):
        live.View()({"rank": 0, "step": 0, "loss": 1.0} | field)
