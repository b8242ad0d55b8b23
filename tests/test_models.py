"""The models: shapes, counts, causality, learning, and that DDP and AMP can take each of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, this_rank
from ddp_course.amp import MixedPrecision
from ddp_course.models import CNN, GPT, MLP, build, parameters_of

SIZES = {
    "mlp": {"width": 32},
    "cnn": {"channels": 4},
    "gpt": {"vocabulary": 12, "context": 8, "width": 16, "layers": 1, "heads": 2},
}


@pytest.fixture(autouse=True)
def one_thread():
    """Small models: a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(name, count=4):
    return torch.randint(12, (count, 8)) if name == "gpt" else torch.randn(count, 64)


def test_shapes():
    assert MLP()(torch.randn(5, 64)).shape == (5, 10)
    assert MLP(inputs=7, classes=3, depth=1)(torch.randn(5, 7)).shape == (5, 3)
    assert CNN()(torch.randn(5, 64)).shape == (5, 10)
    assert CNN(classes=3)(torch.randn(5, 1, 8, 8)).shape == (5, 3)
    assert GPT(30)(torch.randint(30, (5, 64))).shape == (5, 64, 30)
    assert GPT(30)(torch.randint(30, (5, 9))).shape == (5, 9, 30)


def test_parameters_are_counted_and_a_tied_weight_once():
    assert parameters_of(MLP(width=20, depth=2)) == 64 * 20 + 20 + 20 * 20 + 20 + 20 * 10 + 10
    vocabulary, context, width, layers = 50, 16, 32, 3
    block = 12 * width**2 + 13 * width
    expected = (vocabulary + context) * width + layers * block + 2 * width
    model = GPT(vocabulary, context, width, layers)
    assert parameters_of(model) == expected
    assert model.head.weight is model.token.weight


def test_gpt_sees_no_later_character():
    torch.manual_seed(0)
    model = GPT(12, context=8)
    text = torch.randint(12, (1, 8))
    changed = text.clone()
    changed[0, 5] = (text[0, 5] + 1) % 12
    difference = (model(text) - model(changed)).abs().amax(dim=(0, 2))
    assert (difference[:5] < 1e-6).all()
    assert (difference[5:] > 1e-4).all()


def test_gpt_knows_positions_and_heads_differ():
    torch.manual_seed(0)
    logits = GPT(12, context=8)(torch.zeros(1, 8, dtype=torch.int64))
    assert not torch.allclose(logits[0, 0], logits[0, 1], atol=1e-3)
    torch.manual_seed(0)
    assert not torch.allclose(
        logits, GPT(12, context=8, heads=1)(torch.zeros(1, 8, dtype=torch.int64))
    )


def test_gpt_starts_as_good_as_guessing():
    torch.manual_seed(0)
    text = torch.randint(100, (32, 65))
    logits = GPT(100)(text[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(100), abs=0.1)


def test_no_batchnorm_unless_asked_for():
    def has(model):
        return any(isinstance(module, nn.BatchNorm2d) for module in model.modules())

    assert not has(CNN())
    assert has(CNN(batch_norm=True))


@pytest.mark.parametrize("name", SIZES)
def test_build_repeats_by_seed(name):
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(nn.utils.parameters_to_vector(build(name, **SIZES[name]).parameters()))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("name", SIZES)
def test_each_model_learns_sixteen_examples_by_heart(name):
    torch.manual_seed(0)
    model, x = build(name, **SIZES[name]), inputs(name, 16)
    y = x.cumsum(1) % 12 if name == "gpt" else torch.arange(16) % 10  # needs all earlier ones
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: build("rnn"), ValueError, "unknown model 'rnn': choose from mlp, cnn, gpt"),
        (lambda: build("mlp", channels=3), TypeError, "mlp: .*'channels'; its sizes are width, de"),
        (lambda: build("gpt"), TypeError, "gpt: .*'vocabulary'; its sizes are vocabulary, context"),
        (lambda: MLP(width=0), ValueError, "width must be a whole number of at least 1, not 0"),
        (lambda: CNN(channels=1.5), ValueError, "channels must be a whole number"),
        (lambda: GPT("abc"), ValueError, "vocabulary must be a whole number"),
        (lambda: GPT(9, width=10, heads=4), ValueError, "width=10 must be a multiple of heads=4"),
        (
            lambda: GPT(9, context=8)(torch.zeros(1, 9, dtype=torch.int64)),
            ValueError,
            "9 characters at once, but this GPT's context is 8",
        ),
    ],
)
def test_bad_arguments_are_one_clear_line(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def train(name, precision):
    """Two steps of DDP on this rank's own data; every parameter must have taken part."""
    me = this_rank()
    torch.manual_seed(me.rank)
    model = DistributedDataParallel(build(name, **SIZES[name]).to(me.device))
    amp = MixedPrecision(precision, me.device, init_scale=1024)
    amp.check_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with amp.autocast():
            logits = model(inputs(name).to(me.device)).flatten(0, -2)
            loss = F.cross_entropy(logits, torch.full((len(logits),), me.rank, device=me.device))
        amp.backward(loss)
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert not amp.step(optimizer).skipped
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SIZES)
def test_ddp_and_amp_take_each_model(name, precision):
    if (name, precision) == ("cnn", "fp16"):
        with pytest.raises(ValueError, match="many times slower"):
            MixedPrecision(precision).check_model(build(name))
        return
    first, second = launch(train, name, precision, timeout=60).values
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
