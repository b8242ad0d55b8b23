"""Number formats: bits, rounding and neighbours, against PyTorch's own conversions."""

import math
import random

import pytest
import torch

from ddp_course import plots
from ddp_course.formats import FORMATS, as_html, as_text, look, rounded

SPECIAL = [0.0, -0.0, 1.0, 0.1, 65504.0, 65519.9, 65520.0, 6e-8, 2.9e-8, 3e-8, 448.0, 464.0, 465.0]
SPECIAL += [57344.0, 61440.0, 61439.0, 1e-45, 3.4e38, math.inf, -math.inf, 2.0**-14, 2.0**-24]


def values():
    dice = random.Random(0)
    drawn = [math.ldexp(dice.uniform(-2, 2), dice.randint(-40, 20)) for _ in range(3000)]
    # as float32, or PyTorch would round twice
    return [torch.tensor(value, dtype=torch.float32).item() for value in SPECIAL + drawn]


def same(a, b):
    return (math.isnan(a) and math.isnan(b)) or (
        a == b and math.copysign(1, a) == math.copysign(1, b)
    )


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_rounding_is_pytorchs(format):
    for value in values():
        if not format.infinite and abs(value) > format.largest:
            assert same(rounded(value, format), math.copysign(format.largest, value))
            continue  # older releases of PyTorch make a nan of it
        theirs = torch.tensor(value).to(format.dtype).double().item()
        assert same(rounded(value, format), theirs), value


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_bits_are_pytorchs(format):
    whole = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[format.bits]
    for value in values():
        seen = look(value, format)
        if abs(value) > format.largest and not format.infinite:
            continue
        code = torch.tensor(value).to(format.dtype).view(whole).item() % 2**format.bits
        assert seen.sign + seen.exponent + seen.fraction == f"{code:0{format.bits}b}", value


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
def test_ends_and_neighbours(format):
    info = torch.finfo(format.dtype)
    assert (format.largest, format.smallest_normal) == (info.max, info.tiny)
    one = look(1.0, format)
    assert one.above - 1 == info.eps and 1 - one.below == info.eps / 2
    zero = look(0.0, format)
    assert zero.above == format.smallest == -zero.below
    beyond = look(format.largest, format).above
    assert beyond == math.inf if format.infinite else math.isnan(beyond)
    if format.infinite:
        assert look(math.inf, format).below == format.largest
        assert look(-math.inf, format).above == -format.largest
    assert look(format.smallest, format).kind == "subnormal"


def test_errors():
    assert look(0.5, FORMATS["fp16"]).error == 0
    assert look(1e-9, FORMATS["fp16"]).error == 1 and look(1e-9, FORMATS["fp16"]).kind == "zero"
    assert math.isnan(look(1e6, FORMATS["fp16"]).error) and look(1e6, FORMATS["fp16"]).kind == "inf"
    assert look(0.1, FORMATS["bf16"]).error > look(0.1, FORMATS["fp16"]).error
    with pytest.raises(TypeError, match="needs a number, not 'one'"):
        look("one", FORMATS["fp16"])


def test_the_table_has_all_formats():
    for made in (as_text(0.1), as_html(0.1)):
        assert all(name in made for name in FORMATS) and "0.0999755859" in made


def test_the_share_that_becomes_zero_is_what_fp16_makes_zero():
    torch.manual_seed(0)
    gradients = torch.randn(10_000) * 2.0**-23
    zero = (gradients.half() == 0).double().mean().item()
    picture = plots.gradient_histogram(gradients)
    assert f"{100 * zero:.3g} % of the gradients become 0 in fp16" in picture.alternative_text
    moved = plots.gradient_histogram([gradients], loss_scale=2.0**12)
    assert "0 % of the gradients become 0 in fp16 with loss scale 2^12" in moved.alternative_text


@pytest.mark.parametrize(
    ("gradients", "scale", "says"),
    [(torch.zeros(3), 1, "every gradient is 0"), (torch.ones(3), 0, "must be above 0, not 0")],
)
def test_what_cannot_be_drawn(gradients, scale, says):
    with pytest.raises(ValueError, match=says):
        plots.gradient_histogram(gradients, loss_scale=scale)


@pytest.mark.parametrize("value", [1.7976931348623157e308, -1e300, math.inf, math.nan])
def test_any_number_has_a_table(value):
    assert "fp32" in as_text(value) and "fp32" in as_html(value)
