"""Memory, batch and time: the formulas against published numbers, and against real tensors."""

import io
import math
import re

import ipywidgets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image

from ddp_course import calculators, launch, memory, models, plots, widgets
from ddp_course.plots import drawing
from ddp_course.plots.strategies import STRATEGIES

GPT3 = {"layers": 96, "width": 12288, "context": 2048}


def optimizer_of(name, model):
    return {
        "sgd": lambda: torch.optim.SGD(model.parameters(), 0.1),
        "momentum": lambda: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        "adam": lambda: torch.optim.Adam(model.parameters()),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }[name]()


def digits_loss(samples=32):
    x, y = torch.randn(samples, 64), torch.randint(10, (samples,))
    return lambda model: F.cross_entropy(model(x), y)


# ---- against published numbers


def test_gpt3_takes_350_gb_of_weights_and_2800_gb_of_training():
    held = memory.training_memory(175e9)
    assert (held.weights, held.gradients, held.optimizer_state) == (350e9, 350e9, 2100e9)
    assert held.total == 16 * 175e9 == 2800e9  # Rajbhandari et al. 2020: 16 bytes a parameter
    assert "optimizer state: 12 B × 175e9 = 2,100 GB" in held.formula
    assert held.formula.endswith("= 2,800 GB")


@pytest.mark.parametrize(
    "strategy, gigabytes", [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)]
)
def test_zero_shares_out_as_in_its_paper(strategy, gigabytes):
    """Figure 1 of Rajbhandari et al. 2020: 7.5e9 parameters on 64 GPUs."""
    held = memory.training_memory(7.5e9, strategy=strategy, gpus=64)
    assert held.total == pytest.approx(gigabytes * 1e9, rel=0.02)


def test_gpt3_has_175e9_parameters():
    counted = memory.gpt_parameters(**GPT3, vocabulary=50257)
    assert counted.value == pytest.approx(175e9, rel=0.005)


def test_activations_follow_korthikanti():
    """Table 2 of Korthikanti et al. 2022, for s·b·h·layers = 1."""
    shape = {**GPT3, "heads": 96, "micro_batch": 1}
    one = 96 * 2048 * 12288

    def bytes_a_number(**how):
        return memory.activation_memory(**shape, **how).value / one

    attention = 5 * 96 * 2048 / 12288
    assert bytes_a_number() == 34 + attention
    assert bytes_a_number(tensor_parallel=8) == 10 + (24 + attention) / 8
    assert bytes_a_number(tensor_parallel=8, sequence_parallel=True) == (34 + attention) / 8
    assert bytes_a_number(recompute="selective") == 34
    assert bytes_a_number(recompute="full") == bytes_a_number(recompute="full", tensor_parallel=8)
    assert bytes_a_number(recompute="full") == 2


def test_training_time_is_six_floating_point_operations_a_parameter_and_token():
    time = memory.training_time(175e9, 300e9, gpus=1024, peak=312e12, utilisation=0.45)
    # Narayanan et al. 2021 name 34 days for GPT-3 on 1,024 A100 at 140e12 FLOP/s each, with
    # recomputation (8·N·D): three quarters of it without.
    again = memory.training_time(175e9, 300e9, gpus=1024, peak=140e12, utilisation=1)
    assert again.value * 8 / 6 == pytest.approx(34, rel=0.03)
    assert time.value == 6 * 175e9 * 300e9 / (1024 * 312e12 * 0.45) / 86400
    assert "6 × 175e9 × 300e9 = 3.15e23 FLOP" in time.formula


def test_the_global_batch_is_a_product():
    result = memory.global_batch(64, 4, 4)
    assert result.value == 1024 and "64 × 4 × 4 = 1,024" in str(result)
    assert memory.global_batch(32).value == 32


# ---- against real tensors


@pytest.mark.parametrize("optimizer", memory.OPTIMIZERS)
@pytest.mark.parametrize(
    "model", [models.MLP(width=64), models.GPT(50, 16, 32, 2, 4)], ids=["mlp", "gpt"]
)
def test_weights_gradients_and_optimizer_state_are_what_a_step_allocates(model, optimizer):
    numbers = torch.randint(50, (4, 16))
    gpt = isinstance(model, models.GPT)
    loss = (lambda m: m(numbers).square().mean()) if gpt else digits_loss()
    counted = memory.measure(model, optimizer_of(optimizer, model), loss)
    parameters = models.parameters_of(model)
    said = memory.training_memory(parameters, precision="fp32", optimizer=optimizer)
    for part in ("weights", "gradients", "optimizer state"):
        assert counted.parts()[part] == said.parts()[part], part


def test_sixteen_bytes_a_parameter_are_what_sixteen_bit_weights_and_a_master_copy_take():
    model = models.MLP(width=64).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    x, y = torch.randn(8, 64, dtype=torch.bfloat16), torch.randint(10, (8,))
    F.cross_entropy(model(x).float(), y).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    kept = sum(
        v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim() > 0
    )
    said = memory.training_memory(models.parameters_of(model), precision="bf16")
    assert said.weights == sum(p.nbytes for p in model.parameters())
    assert said.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert said.optimizer_state == kept + sum(master.nbytes for master in masters)


def test_autocast_keeps_weights_and_gradients_in_fp32():
    model, loss = models.MLP(width=64), digits_loss()

    def cast(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(model)

    counted = memory.measure(model, optimizer_of("adamw", model), cast)
    said = memory.training_memory(models.parameters_of(model), precision="amp")
    assert (counted.weights, counted.gradients) == (said.weights, said.gradients)
    assert said.total == 16 * models.parameters_of(model)


def test_the_mlps_activations_are_counted_to_the_byte():
    samples, width, depth = 32, 128, 3
    model = models.MLP(width=width, depth=depth)
    counted = memory.measure(model, optimizer_of("sgd", model), digits_loss(samples))
    floats = 64 + depth * width + 10  # the batch, each hidden layer after ReLU, log-probabilities
    # the labels, and the number that the loss was divided by
    assert counted.activations == samples * (4 * floats + 8) + 4


def test_a_transformers_activations_are_near_the_formula():
    shape = {"context": 64, "width": 128, "layers": 4, "heads": 4}
    model, numbers = models.GPT(100, **shape), torch.randint(100, (8, 64))
    counted = memory.measure(
        model,
        optimizer_of("sgd", model),
        lambda m: F.cross_entropy(m(numbers).flatten(0, 1), numbers.flatten()),
    )
    # fp32: twice the bytes. Our attention keeps no matrix of scores: "selective".
    said = 2 * memory.activation_memory(**shape, micro_batch=8, recompute="selective").value
    assert counted.activations == pytest.approx(said, rel=0.15)  # no dropout; logits on top


def test_activations_grow_with_the_batch_and_nothing_else_does():
    model = models.MLP()
    small, large = (
        memory.measure(model, optimizer_of("adamw", model), digits_loss(n)) for n in (16, 64)
    )
    assert large.activations - 4 == 4 * (small.activations - 4)
    assert large.weights == small.weights and large.optimizer_state == small.optimizer_state


@pytest.mark.parametrize("sizes", [(50, 16, 32, 2, 4), (97, 64, 64, 3, 2)])
def test_the_gpt_formula_counts_what_our_gpt_has(sizes):
    vocabulary, context, width, layers, heads = sizes
    said = memory.gpt_parameters(
        layers=layers, width=width, vocabulary=vocabulary, context=context
    ).value
    assert said == models.parameters_of(models.GPT(*sizes))


def sharded_state():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    memory.measure(model, optimizer, lambda model: model(torch.ones(1, 64)).sum())
    states = (v for state in optimizer.optim.state.values() for v in state.values())
    weights = sum(p.nbytes for p in model.parameters())
    return weights, sum(v.nbytes for v in states if v.dim() > 0)


def test_zero_1_halves_the_optimizer_state_on_two_ranks():
    said = memory.training_memory(4 * 64 * 64, precision="fp32", strategy="zero1", gpus=2)
    for weights, state in launch(sharded_state).values:
        assert (weights, state) == (said.weights, said.optimizer_state)


# ---- how numbers are written


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0 B"), (512, "512 B"), (1500, "1.5 kB"), (350e9, "350 GB"), (2.8e12, "2,800 GB"),
        (999.9e6, "1 GB"), (5.47e9, "5.47 GB"), (999.6e9, "1,000 GB"),
    ],
)  # fmt: skip
def test_bytes_are_written_with_three_digits(value, text):
    assert memory.in_bytes(value) == text


@pytest.mark.parametrize(
    "value, text", [(512, "512"), (4810, "4,810"), (481e4, "4.81e6"), (174.6e9, "174.6e9")]
)
def test_counts_are_written_as_people_say_them(value, text):
    assert memory.say(value) == text


# ---- wrong arguments


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda: memory.training_memory(0), "parameters=0 must be a number above 0"),
        (lambda: memory.training_memory("7e9"), "parameters='7e9' must be a number"),
        (lambda: memory.training_memory(1e9, gpus=0), "gpus=0 must be a whole number"),
        (lambda: memory.training_memory(1e9, gpus=8), 'strategy "none" is for one GPU, not 8'),
        (lambda: memory.training_memory(1e9, precision="int8"), "choose from fp32, amp, fp16, bf"),
        (lambda: memory.training_memory(1e9, optimizer="lion"), "choose from sgd, momentum, adam"),
        (lambda: memory.training_memory(1e9, strategy="dp"), "choose from none, ddp, zero1"),
        (lambda: memory.training_memory(1e9, activations=-1), "activations=-1"),
        (lambda: memory.training_memory(1e9, activations=math.nan), "activations=nan"),
        (lambda: memory.global_batch(0), "micro_batch=0 must be a whole number"),
        (lambda: memory.global_batch(2.5), "micro_batch=2.5 must be a whole number"),
        (
            lambda: memory.training_time(1e9, 1e9, gpus=1, peak=1e12, utilisation=40),
            "a share of the peak: at most 1",
        ),
        (
            lambda: memory.activation_memory(**GPT3, heads=96, micro_batch=1, recompute="some"),
            'choose "none", "selective" or "full"',
        ),
        (lambda: calculators.training_memory("GPT-5"), "model='GPT-5': choose from GPT-3 small"),
        (lambda: calculators.training_time(gpus=3), "gpus=3: choose from 1, 2, 4"),
        (lambda: plots.memory_ledger(memory.training_memory(1e9), limit=0), "limit=0"),
        (lambda: plots.strategies(["data"]), "choose from data (DDP), sharded data"),
        (lambda: plots.index_grid({"a": [[0]]}, samples=0), "from 1 to 32 can be drawn"),
        (lambda: plots.index_grid({"a": [[0], [5]]}, samples=4), "a: rank 1 gets sample 5 of 4"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(call, said):
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "call", [lambda: plots.memory_ledger({}), lambda: plots.memory_ledger({"a": 3}),
             lambda: plots.memory_ledger(3), lambda: plots.index_grid([], 4)]
)  # fmt: skip
def test_what_cannot_be_drawn_is_a_type_error(call):
    with pytest.raises(TypeError, match="draws"):
        call()


# ---- figures

FIGURES = {
    "one": lambda: plots.memory_ledger(memory.training_memory(175e9, activations=275e9)),
    "small": lambda: plots.memory_ledger(memory.training_memory(1e5), limit=None),
    "several": lambda: plots.memory_ledger(
        {f"a rather long name, {n}": memory.training_memory(n * 1e9) for n in (1, 6, 100)}
    ),
    "strategies": plots.strategies,
    "indices": lambda: plots.index_grid({"a": [range(0, 32, 2), range(0, 32, 3)]}, samples=32),
    "eight ranks": lambda: plots.index_grid({"a": [[0]] * 8}, samples=1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_every_letter_can_be_read(name):
    figure = FIGURES[name]()
    pixels = np.asarray(Image.open(io.BytesIO(figure.png())).convert("RGB"))
    for edge in (pixels[:2], pixels[-2:], pixels[:, :2], pixels[:, -2:]):
        assert (edge == 255).all()
    assert all(text.get_fontsize() >= 11 for text in figure.findobj(Text) if text.get_text())
    assert figure.get_suptitle().replace("\n", " ") in figure.alternative_text


def bars(figure):
    """The widths of the bars by row and colour."""
    found = {}
    for patch in figure.axes[0].patches:
        row = round(patch.get_y() + patch.get_height() / 2)
        found.setdefault(row, []).append((to_hex(patch.get_facecolor()), patch.get_width()))
    return found


def test_the_ledger_grows_part_by_part_in_the_fixed_order():
    held = memory.training_memory(1e9, activations=3e9)
    figure = plots.memory_ledger(held, limit=8e9)
    rows = bars(figure)
    colors = [color.lower() for color in drawing.MEMORY.values()]
    for row in range(4):
        widths = [2e9, 2e9, 12e9, 3e9][: row + 1] + [0] * (3 - row)
        assert rows[row] == list(zip(colors, widths, strict=True))
    words = {text.get_text() for text in figure.axes[0].texts}
    assert {"2 GB", "4 GB", "16 GB", "19 GB", "one GPU: 8 GB"} <= words
    assert figure.get_suptitle() == "Training takes 19 GB, 2.4 times what one GPU has"
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "X"]
    assert [line.get_ydata()[0] for line in crosses] == [2, 3]  # the bars beyond the line


def test_strategies_stand_side_by_side():
    held = {
        name: memory.training_memory(7e9, strategy=name, gpus=8, activations=1e9)
        for name in ("ddp", "zero1", "zero3")
    }
    figure = plots.memory_ledger(held)
    assert figure.get_suptitle() == "Too much for one GPU's 80 GB: ddp"
    assert "zero3: 15 GB (weights 1.75 GB, gradients 1.75 GB," in figure.alternative_text


def test_the_map_has_every_strategy_with_what_crosses():
    figure = plots.strategies()
    words = {text.get_text() for text in figure.axes[0].texts}
    assert set(STRATEGIES) <= words
    assert "gradients, after each backward" in words
    assert all(name in figure.alternative_text for name in STRATEGIES)


def test_the_index_grid_outlines_what_is_dealt_twice_and_marks_what_nobody_gets():
    figure = plots.index_grid({"epoch 0": [[0, 2], [1, 0]], "epoch 1": [[0], [1]]}, samples=4)
    outlined = [p for p in figure.axes[0].patches if not p.get_fill()]
    assert [(round(p.get_x() + 0.46), round(p.get_y() + 0.42)) for p in outlined] == [(0, 0)]
    assert figure.get_suptitle() == "1 sample dealt more than once (outlined)"
    assert "epoch 0: rank 0: 0, 2; rank 1: 0, 1; more than once: 0; nobody: 3" in (
        figure.alternative_text
    )
    same = plots.index_grid({"a": [[0], [1]], "b": [[0], [1]]}, samples=2)
    assert same.get_suptitle().startswith("Every row is the same")


# ---- calculators


def parts(box, kind):
    found = [box] if isinstance(box, kind) else []
    return found + [part for child in getattr(box, "children", ()) for part in parts(child, kind)]


def test_without_widgets_a_calculator_shows_its_start_values(capsys):
    calculators.training_memory(strategy="zero3", gpus=64)
    printed = capsys.readouterr().out
    assert "training memory: model GPT-3 175 B" in printed
    assert "weights: 2 B × 174.6e9 / 64 = 5.46 GB" in printed
    calculators.global_batch()
    calculators.training_time()
    printed = capsys.readouterr().out
    assert "64 × 4 × 4 = 1,024" in printed and "days" in printed


def test_with_widgets_every_change_computes_and_draws_again(monkeypatch):
    shown = []
    monkeypatch.setattr(calculators, "interactive", lambda: True)
    monkeypatch.setattr("IPython.display.display", shown.append)
    calculators.training_memory()
    (box,) = shown
    *inputs, said, drawn = box.children
    assert all(part.description for part in inputs)
    named = {part.description: part for part in inputs}
    assert "= 350 GB" not in said.value and "= 349 GB" in said.value
    before = drawn.value
    named["GPUs"].value = 64
    assert "need a strategy" in said.value and drawn.value == ""
    named["strategy"].value = "zero3"
    assert "/ 64 = 5.46 GB" in said.value
    assert drawn.value.startswith("<img ") and "alt=" in drawn.value and drawn.value != before
    count = len(ipywidgets.widgets.widget._instances)
    calculators.training_memory()
    assert len(ipywidgets.widgets.widget._instances) == count
    widgets.close(shown[-1])
