"""Mixed precision: what a step reports, what it changes, and that ranks stay in step."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, this_rank
from ddp_course.accumulation import Window, accumulate
from ddp_course.amp import PRECISIONS, MixedPrecision
from ddp_course.models import CNN, GPT, MLP


@pytest.fixture(autouse=True)
def one_thread():
    """Small models: a second thread costs more than it gives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def setup(precision, lr=0.1, **options):
    torch.manual_seed(0)
    model = MLP(width=32)
    x, y = torch.randn(16, 64), torch.randint(10, (16,))
    amp = MixedPrecision(precision, **options)
    return model, torch.optim.SGD(model.parameters(), lr=lr), amp, x, y


def one_step(model, optimizer, amp, x, y, factor=1.0):
    with amp.autocast():
        loss = F.cross_entropy(model(x), y)
    amp.backward(loss * factor)
    return amp.step(optimizer)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def true_norm(model, x, y):
    gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    return torch.cat([g.flatten() for g in gradients]).norm().item()


@pytest.mark.parametrize("precision, dtype", [("fp32", None), ("bf16", torch.bfloat16)])
def test_fp32_and_bf16_are_the_plain_loop_without_a_scaler(precision, dtype):
    model, optimizer, amp, x, y = setup(precision)
    plain, plain_optimizer, *_ = setup(precision)
    for _ in range(3):
        result = one_step(model, optimizer, amp, x, y)
        with torch.amp.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = F.cross_entropy(plain(x), y)
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert (result.loss_scale, result.skipped) == (1.0, False)
    assert torch.equal(flat(model), flat(plain))
    assert not amp.scaler.is_enabled()


@pytest.mark.parametrize(
    "precision, dtype",
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_computes_in_the_precision_and_leaves_the_weights(precision, dtype):
    model, _, amp, x, _ = setup(precision)
    with amp.autocast():
        assert model(x).dtype == dtype
    assert flat(model).dtype == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
def test_grad_norm_is_that_of_the_true_gradients_before_clipping(precision):
    for max_norm in (None, 1e-3):
        model, optimizer, amp, x, y = setup(precision, max_norm=max_norm)
        expected = true_norm(model, x, y)
        result = one_step(model, optimizer, amp, x, y)
        assert isinstance(result.grad_norm, float)
        assert result.grad_norm == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clipping_acts_on_the_unscaled_gradients(precision):
    changes = {}
    for max_norm in (None, 0.01, 1e6):
        model, optimizer, amp, x, y = setup(precision, lr=1.0, max_norm=max_norm)
        before = flat(model)
        result = one_step(model, optimizer, amp, x, y)
        changes[max_norm] = (flat(model) - before).norm().item()
    assert changes[None] == pytest.approx(result.grad_norm, rel=1e-3)
    assert changes[1e6] == changes[None]  # above the norm: clips nothing
    assert changes[0.01] == pytest.approx(0.01, rel=1e-3)


def test_fp16_scales_keep_and_grow():
    model, optimizer, amp, x, y = setup("fp16", growth_interval=2, init_scale=1024)
    scales = [one_step(model, optimizer, amp, x, y).loss_scale for _ in range(5)]
    assert scales == [1024, 1024, 2048, 2048, 4096]  # the scale each step was taken with
    assert [result.loss_scale for result in amp.history] == scales
    assert not any(result.skipped for result in amp.history)


def overflow_on_one_rank():
    """Three windows of two micro-batches; in the second, rank 1's first one holds an inf."""
    me = this_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(MLP(width=32).to(me.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    amp = MixedPrecision("fp16", me.device)
    torch.manual_seed(me.rank)
    weights = [flat(model)]
    for number in range(3):
        window = Window((torch.randn(8, 64), torch.randint(10, (8,))) for _ in range(2))
        if number == 1 and me.rank == 1:
            window[0][0][0, 0] = math.inf
        for x, y in accumulate(model, window):
            with amp.autocast():
                loss = F.cross_entropy(model(x.to(me.device)), y.to(me.device))
            amp.backward(loss / 2)
        amp.step(optimizer)
        weights.append(flat(model))
    return weights, amp.history, amp.scaler.get_scale()


@pytest.mark.parametrize("world_size", [2, 3])
def test_inf_on_one_rank_skips_and_halves_on_all(world_size):
    ranks = launch(overflow_on_one_rank, nproc=world_size, timeout=60).values
    for weights, history, scale in ranks:
        assert [result.loss_scale for result in history] == [65536, 65536, 32768]
        assert [result.skipped for result in history] == [False, True, False]
        assert [math.isfinite(result.grad_norm) for result in history] == [True, False, True]
        assert scale == 32768
        start, first, second, third = weights
        assert torch.equal(first, second)
        assert not torch.equal(start, first)
        assert not torch.equal(second, third)
        assert torch.isfinite(third).all()
        assert all(map(torch.equal, weights, ranks[0][0]))


def test_a_skipped_step_leaves_the_optimizer_state_and_clears_the_gradients():
    model, optimizer, amp, x, y = setup("fp16")
    optimizer = torch.optim.Adam(model.parameters())
    one_step(model, optimizer, amp, x, y)
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    assert one_step(model, optimizer, amp, x, y, factor=math.inf).skipped
    assert all(map(torch.equal, moments, (s["exp_avg"] for s in optimizer.state.values())))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_fused_optimizer_reports_its_skips_too():
    model, _, amp, x, y = setup("fp16")
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    before = flat(model)
    assert one_step(model, optimizer, amp, x, y, factor=math.inf).skipped
    assert torch.equal(flat(model), before)
    assert not one_step(model, optimizer, amp, x, y).skipped
    assert not torch.equal(flat(model), before)


def test_a_collapsing_loss_scale_warns_once_and_stays_skipped_at_zero():
    model, optimizer, amp, x, y = setup("fp16", init_scale=2.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [one_step(model, optimizer, amp, x, y, factor=math.inf) for _ in range(160)]
    assert ["loss scale fell below 1" in str(w.message) for w in caught] == [True]
    assert results[0].loss_scale == 2.0
    assert results[-1].loss_scale == 0.0
    assert all(result.skipped for result in results)


def test_state_goes_on_as_if_never_stopped():
    model, optimizer, amp, x, y = setup("fp16", growth_interval=3, init_scale=1024)
    factors = [1, math.inf, 1, 1, 1, 1, 1, 1, 1]
    expected = [one_step(model, optimizer, amp, x, y, factor=f).loss_scale for f in factors]
    for stop in range(len(factors)):
        model, optimizer, amp, x, y = setup("fp16", growth_interval=3, init_scale=1024)
        scales = [one_step(model, optimizer, amp, x, y, f).loss_scale for f in factors[:stop]]
        resumed = MixedPrecision("fp16")
        resumed.load_state_dict(amp.state_dict())
        scales += [one_step(model, optimizer, resumed, x, y, f).loss_scale for f in factors[stop:]]
        assert scales == expected


def test_state_of_another_precision_is_refused():
    saved = MixedPrecision("fp32").state_dict()
    with pytest.raises(ValueError, match="saved with precision 'fp32', this run uses 'fp16'"):
        MixedPrecision("fp16").load_state_dict(saved)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precision": "fp8"}, "unknown precision 'fp8': choose from fp32, bf16, fp16"),
        ({"precision": None}, "unknown precision None"),
        ({"max_norm": 0}, "max_norm must be above 0"),
        ({"max_norm": "1"}, "max_norm must be above 0"),
        ({"max_norm": math.nan}, "max_norm must be above 0"),
        ({"init_scale": 0}, "init_scale must be above 0"),
        ({"init_scale": math.inf}, "init_scale must be above 0 and finite"),
        ({"growth_interval": 0}, "growth_interval must be a number of steps"),
        ({"growth_interval": 1.5}, "growth_interval must be a number of steps"),
        ({"precision": "bf16", "device": "meta"}, "bf16 does not work on meta"),
    ],
)
def test_bad_arguments_are_one_clear_line(options, message):
    with pytest.raises(ValueError, match=message) as caught:
        MixedPrecision(**options)
    assert "\n" not in str(caught.value)


def test_cuda_without_a_gpu_is_an_error_in_every_precision(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for precision in PRECISIONS:
        with pytest.raises(RuntimeError, match="PyTorch sees no GPU here: use 'cpu'"):
            MixedPrecision(precision, "cuda")


def test_a_pytorch_that_would_silently_stay_in_fp32_is_an_error(monkeypatch):
    autocast = torch.amp.autocast

    def old_autocast(device_type, dtype=None, enabled=True):
        return autocast(device_type, enabled=False)

    monkeypatch.setattr(torch.amp, "autocast", old_autocast)
    with pytest.raises(ValueError, match="fp16 does not work on cpu with this PyTorch: use 'fp32'"):
        MixedPrecision("fp16")
    MixedPrecision("fp32")


def test_a_gpu_that_only_emulates_bf16_is_named_in_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr("ddp_course.amp._autocast_works", lambda precision, device: True)
    with pytest.warns(UserWarning, match="Tesla T4 emulates bf16: right results, but slow"):
        MixedPrecision("bf16", "cuda")


def test_fp16_convolutions_on_a_cpu_are_refused_with_the_alternatives():
    with pytest.raises(ValueError, match="many times slower.*'bf16' or 'fp32'.*without conv") as c:
        MixedPrecision("fp16").check_model(CNN())
    assert "\n" not in str(c.value)
    MixedPrecision("bf16").check_model(CNN())
    MixedPrecision("fp32").check_model(CNN())
    MixedPrecision("fp16").check_model(MLP())
    MixedPrecision("fp16").check_model(GPT(10))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_cast_to_half_is_refused(precision):
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(ValueError, match=f"parameter 0.weight is {dtype}: leave the model in"):
            MixedPrecision(precision).check_model(MLP().to(dtype))


def test_a_float64_model_runs_in_fp32_only_since_autocast_would_ignore_it():
    MixedPrecision("fp32").check_model(MLP().double())
    with pytest.raises(ValueError, match="torch.float64"):
        MixedPrecision("fp16").check_model(MLP().double())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_without_gradients_says_what_is_missing(precision):
    model, optimizer, amp, x, y = setup(precision)
    F.cross_entropy(model(x), y).backward()  # not amp.backward: unscaled
    with pytest.raises(RuntimeError, match="no amp.backward"):
        amp.step(optimizer)
    amp.backward(F.cross_entropy(model(x), y))
    with pytest.raises(RuntimeError, match="no parameter of this optimizer has a gradient"):
        amp.step(torch.optim.SGD(MLP().parameters()))
    amp.step(optimizer)
    with pytest.raises(RuntimeError, match="no amp.backward"):
        amp.step(optimizer)
