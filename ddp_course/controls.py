"""A control panel for a run in the background: buttons, dials and a picture that moves.

    controls.Panel(worker, dials={"learning_rate": (0.01, 0.1, 1.0)}, draw=live.panels)

For a room: big type, no code in view. Everything can be reached with the Tab key and worked with
the arrow keys and the space bar.
"""

import html
import inspect
import math
import threading
from collections.abc import Callable

import ipywidgets as widgets

from . import background, errors, live
from .launch import launch
from .plots import Picture

STATES = {  # of a run: what to say of it
    "ready": "● ready: press Start",
    "starting": "◌ starting …",
    "running": "▶ running",
    "paused": "❚❚ paused",
    "stopped": "■ stopped: all ranks are gone",
    "done": "✓ done",
    "failed": "✕ failed",
}


class Panel(widgets.VBox):
    """Start, stop and steer `worker` on `nproc` ranks while `draw(records)` shows what they report.

    `worker` may be {"name": function, …}, to be chosen from. `dials`, for the ranks to read with
    `dials(name=…)`: {name: (lowest, first, highest)} as sliders, or {name: False or True} as check
    boxes, then 0 or 1. `draw` returns SVG or HTML text, or a Picture; it is called in a thread, at
    most five times a second. `harm` offers to kill and to slow a rank, `listing` shows the chosen
    worker's source. `size` of the type is in points; `options` go to `launch`. A new panel ends the
    run of the one before, as running its cell again should.
    """

    def __init__(
        self,
        worker: Callable | dict[str, Callable],
        nproc: int = 2,
        dials: dict | None = None,
        draw: Callable = live.panels,
        title: str = "",
        harm: bool = False,
        listing: bool = False,
        size: int = 18,
        timeout: float | None = None,
        **options,
    ):
        background.stop_latest()
        self._options = {"nproc": nproc, "timeout": timeout, **options}
        self._worker, choice = _choice(worker)
        for chosen in choice:
            chosen.observe(self._choose_another, "value")
        self._listing = [widgets.HTML()] if listing else []
        self._draw, self._size = draw, size
        self.run, self._pace, self._records = None, live.Pace(), []
        self._status = widgets.HTML()
        self._picture = widgets.HTML(self._styled("&nbsp;"))
        self.dials = {name: _dial(name, values) for name, values in (dials or {}).items()}
        for dial in self.dials.values():
            dial.observe(self._turn, "value")
        heading = [widgets.HTML(self._styled(f"<b>{html.escape(title)}</b>", 1.3))] * bool(title)
        rows = [widgets.HBox(self._buttons(), layout=_WRAP), *self.dials.values()]
        rows[:0] = choice
        if harm:
            rows.append(widgets.HBox(self._harm(nproc), layout=_WRAP))
        shown = [*self._listing, self._status, self._picture]
        super().__init__([_big(), *heading, *rows, *shown])
        self.add_class("ddp-course-panel")
        self._get_ready()

    # what is pressed

    def start(self, *_) -> None:
        """Start the run, ending the one before; the kernel stays free."""
        self._records, self._pace = [], live.Pace()
        self._picture.value = self._styled("&nbsp;")
        values = {name: float(dial.value) for name, dial in self.dials.items()}
        self._tell("starting")
        try:
            self.run = launch(self._worker(), wait=False, on_record=self._heard, **self._options)
        except (TypeError, ValueError) as error:
            self._tell("failed", error)
            return
        self.run.set(**values)
        threading.Thread(target=self._follow, args=(self.run,), daemon=True).start()

    def stop(self, *_) -> None:
        """End the run; all its ranks are gone when this returns."""
        if self.run is not None:
            self.run.stop()

    def pause(self, *_) -> None:
        """Stop the ranks where they are, or let them go on."""
        if self.run is not None and self.run.running:
            (self.run.resume if self.run.paused else self.run.pause)()
            self._tell("paused" if self.run.paused else "running")

    def kill(self, *_) -> None:
        """Kill the chosen rank."""
        if self.run is not None:
            self.run.kill(self._victim.value)

    def slow(self, *_) -> None:
        """Slow the chosen rank by the chosen factor, and let the others run freely."""
        if self.run is not None:
            for rank in range(self.run.nproc):
                chosen = rank == self._victim.value
                self.run.slow(rank, self._factor.value if chosen else 1)

    def _choose_another(self, _) -> None:
        """End the run of the worker that was chosen before, and clear what was shown of it."""
        self.stop()
        self.run = None
        self._get_ready()

    def _turn(self, change) -> None:
        if self.run is not None:
            self.run.set(**{change.owner.description.replace(" ", "_"): float(change.new)})

    # what is shown

    def _get_ready(self) -> None:
        self._picture.value = self._styled("&nbsp;")
        for listing in self._listing:
            listing.value = self._styled(_listing(self._worker()))
        self._tell("ready")

    def _heard(self, record: dict) -> None:
        self._records.append(record)
        self._pace.draw(self._redraw)

    def _redraw(self) -> None:
        drawn = self._draw(self._records)
        content = drawn.html() if isinstance(drawn, Picture) else drawn
        self._picture.value = self._styled(content)

    def _follow(self, run) -> None:
        """Wait for the end of a run, and show it, unless the next has begun."""
        self._tell("running")
        state, failure = "done", None
        try:
            run.wait()
        except errors.Stopped:
            state = "stopped"
        except BaseException as error:
            state, failure = "failed", error
        if run is self.run:
            self._tell(state, failure)
            if self._records:
                self._redraw()

    def _tell(self, state: str, error=None) -> None:
        text = f'<div role="status" aria-live="polite">{STATES[state]}</div>'
        if error is not None:
            text += _failure(error)
        self._status.value = self._styled(text)

    def _styled(self, content: str, times: float = 1) -> str:
        return _styled(content, self._size * times)

    # what it is made of

    def _buttons(self) -> list:
        return [
            _button("Start", "play", self.start, "Start the ranks, or start them anew"),
            _button("Stop", "stop", self.stop, "End all ranks"),
            _button("Pause / go on", "pause", self.pause, "Stop the ranks where they are"),
        ]

    def _harm(self, nproc: int) -> list:
        self._victim = _choose([(f"rank {rank}", rank) for rank in range(nproc)], nproc - 1)
        self._factor = widgets.IntSlider(
            value=1, min=1, max=10, description="times as slow", style=_NAMES
        )
        self._factor.observe(self.slow, "value")
        kill = _button("Kill it", "bolt", self.kill, "Kill the chosen rank's process")
        return [self._victim, kill, self._factor]


_WRAP = {"flex_flow": "row wrap", "align_items": "center"}
_NAMES = {"description_width": "initial"}


def _choose(options: list, value=None):
    """Return buttons of which one is down. (JupyterLab takes the arrow keys of radio buttons.)"""
    first = options[0][1] if isinstance(options[0], tuple) else options[0]
    look = {"font_size": "16pt", "button_width": "auto"}
    return widgets.ToggleButtons(
        options=options, value=first if value is None else value, style=look
    )


def _styled(content: str, size: float) -> str:
    look = f"font: {size:g}pt sans-serif; line-height: 1.4; color: #222"
    return f'<div style="{look}">{content}</div>'


def _failure(error) -> str:
    message = html.escape(f"{type(error).__name__}: {error}")
    look = "white-space: pre-wrap; word-break: normal; overflow-wrap: anywhere; font-size: 85%"
    return f'<pre style="{look}">{message}</pre>'


def _listing(worker: Callable) -> str:
    """Return a function's source, with the line numbers that errors name."""
    try:
        lines, first = inspect.getsourcelines(worker)
    except (OSError, TypeError):
        return ""
    text = "".join(f"{number:3}  {line}" for number, line in enumerate(lines, max(1, first)))
    look = "font-family: monospace; white-space: pre; line-height: 1.3; font-size: 85%"
    return f'<div style="{look}">{html.escape(text)}</div>'


def _big() -> widgets.HTML:
    """What ipywidgets has no setting for: the size of names, values and choices."""
    parts = (".widget-label", ".widget-readout", "label", ".widget-toggle-button")
    names = ", ".join(f".ddp-course-panel {part}" for part in parts)
    look = "font-size: 16pt; height: auto; line-height: 1.5; min-width: 5em"
    ticks = ".ddp-course-panel input { width: 22px; height: 22px; margin: 4px 10px 4px 2px }"
    # a picture and the slider above it fit on one screen
    picture = ".ddp-course-panel img { max-height: 46vh; width: auto }"
    style = f"<style>{names} {{ {look} }} {ticks} {picture}</style>"
    return widgets.HTML(style, layout={"display": "none"})


def _choice(worker) -> tuple[Callable, list]:
    """Return a function that returns the chosen worker, and the widget to choose it with."""
    if not isinstance(worker, dict):
        return lambda: worker, []
    chosen = _choose(list(worker))
    return lambda: worker[chosen.value], [chosen]


def _button(words: str, icon: str, action: Callable, tooltip: str):
    button = widgets.Button(
        description=words,
        icon=icon,
        tooltip=tooltip,
        style={"font_size": "16pt"},
        layout={"width": "auto", "height": "auto", "padding": "6px 18px"},
    )
    button.on_click(action)
    return button


def _dial(name: str, values):
    """Return the widget of a dial: a check box for a truth value, else a slider."""
    look = {"description": name.replace("_", " "), "style": _NAMES}
    if isinstance(values, bool):
        return widgets.Checkbox(value=values, indent=False, **look)
    try:
        low, first, high = values
        right = low <= first <= high
    except (TypeError, ValueError):
        right = False
    if not right:
        raise ValueError(f"dial {name}: give (lowest, first, highest), or a bool: got {values!r}.")
    look["layout"] = {"width": "600px"}
    if all(isinstance(value, int) for value in values):
        return widgets.IntSlider(value=first, min=low, max=high, **look)
    if low > 0 and high / low >= 50:
        look["readout_format"] = ",.0f" if low >= 1 else ".3g"
        ends = {"min": math.log10(low), "max": math.log10(high)}
        return widgets.FloatLogSlider(value=first, **ends, **look)
    step = (high - low) / 100
    return widgets.FloatSlider(
        value=first, min=low, max=high, step=step, readout_format=".3g", **look
    )


class Stepper(widgets.VBox):
    """Run a worker to its end, then step through what it reported: `draw(records, step)`.

    `runs`: {"name": (worker, options for launch, range of steps)}, to be chosen from.
    """

    def __init__(self, runs: dict, draw: Callable, title: str = "", size: int = 18):
        self._runs, self._draw, self._size, self._records = runs, draw, size, []
        self._chosen = _choose(list(runs))
        self._chosen.observe(lambda _: self.start(), "value")
        self.slider = widgets.IntSlider(
            description="step", style=_NAMES, layout={"width": "600px"}, disabled=True
        )
        self.slider.observe(lambda _: self._redraw(), "value")
        self._picture = widgets.HTML()
        start = _button("Start", "play", self.start, "Run it on real ranks")
        back = _button("Back", "step-backward", lambda _: self._move(-1), "One step back")
        on = _button("Next", "step-forward", lambda _: self._move(1), "One step on")
        row = widgets.HBox([start, back, on, self.slider], layout=_WRAP)
        heading = widgets.HTML(_styled(f"<b>{html.escape(title)}</b>", size * 1.3))
        super().__init__([_big(), heading, self._chosen, row, self._picture])
        self.add_class("ddp-course-panel")

    def start(self, *_) -> None:
        """Run the chosen worker, and show its first step."""
        worker, options, steps = self._runs[self._chosen.value]
        self.slider.disabled = True
        self._picture.value = _styled(STATES["starting"], self._size)
        try:
            self._records = launch(worker, **options).records
        except errors.RunError as error:
            self._picture.value = _styled(_failure(error), self._size)
            return
        with self.slider.hold_trait_notifications():  # neither may pass the other on the way
            self.slider.min, self.slider.max = steps[0], steps[-1]
        self.slider.value, self.slider.disabled = steps[0], False
        self._redraw()

    def _move(self, by: int) -> None:
        if not self.slider.disabled:
            self.slider.value += by

    def _redraw(self) -> None:
        drawn = self._draw(self._records, self.slider.value)
        self._picture.value = drawn.html() if isinstance(drawn, Picture) else drawn
