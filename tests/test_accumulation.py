"""Windows, divisor, `no_sync`: DDP with accumulation equals one process on the global batch."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, this_rank
from ddp_course.accumulation import Window, accumulate, windows
from ddp_course.models import GPT, MLP

STEPS = 2
# Samples in each micro-batch, by rank: uneven everywhere, and a last window of one or two.
SIZES = [[5, 3, 4, 2, 1], [2, 6, 1, 3, 2, 4], [1, 1, 7, 2, 5]]


def make_model(name, dtype):
    if name == "gpt":  # tied weights
        return GPT(11, context=8, width=16, layers=1, heads=2).to(dtype)
    model = MLP(width=16)
    if name == "frozen":
        model[0].requires_grad_(False)
    return model.to(dtype)


def make_batches(name, dtype, rank, device="cpu"):
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for size in SIZES[rank]:
        if name == "gpt":
            text = torch.randint(11, (size, 9), generator=generator)
            x, y = text[:, :-1], text[:, 1:]
        else:
            x = torch.randn(size, 64, generator=generator, dtype=dtype)
            y = torch.randint(10, (size,), generator=generator)
        batches.append((x.to(device), y.to(device)))
    return batches


def loss_of(model, x, y, reduction):
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction=reduction)


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_on_ranks(name, dtype):
    me = this_rank()
    torch.manual_seed(me.rank)  # ranks start apart; DDP gives them rank 0's weights
    model = DistributedDataParallel(make_model(name, dtype).to(me.device))
    optimizer = make_optimizer(model)
    for window in windows(make_batches(name, dtype, me.rank, me.device), STEPS):
        divisor = window.divisor()
        for x, y in accumulate(model, window):
            (loss_of(model, x, y, "sum") / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module.state_dict()


def train_alone(name, dtype, world_size):
    """One process, each step on the whole global window at once, with the plain mean loss."""
    torch.manual_seed(0)
    model = make_model(name, dtype)
    optimizer = make_optimizer(model)
    ranks = [make_batches(name, dtype, rank) for rank in range(world_size)]
    for first in range(0, 6, STEPS):
        batches = [batch for rank in ranks for batch in rank[first : first + STEPS]]
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        loss_of(model, x, y, "mean").backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# float32: three steps, weights below 1, so a few roundings of 6e-8 each
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", ["mlp", "gpt", "frozen"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_with_accumulation_equals_one_process_on_the_global_batch(
    world_size, name, dtype, bound
):
    ranks = launch(train_on_ranks, name, dtype, nproc=world_size, timeout=60).values
    alone = train_alone(name, dtype, world_size)
    for weights in ranks:
        for key, expected in alone.items():
            assert (weights[key] - expected).abs().max() <= bound, key
            assert torch.equal(weights[key], ranks[0][key]), key


def all_reduces_by_window(with_accumulate):
    buckets, device = [], this_rank().device

    def count(state, bucket):
        buckets.append(bucket.index())
        return allreduce_hook(None, bucket)

    model = DistributedDataParallel(MLP(width=64, depth=4).to(device), bucket_cap_mb=0.02)
    model.register_comm_hook(None, count)
    by_window, batches = [], make_batches("mlp", torch.float32, 0, device)
    for _ in range(2):  # DDP cuts its final buckets after the first backward
        loss_of(model, *batches[0], "mean").backward()
    for window in windows(batches, 2):
        buckets.clear()
        for x, y in accumulate(model, window) if with_accumulate else window:
            loss_of(model, x, y, "mean").backward()
        by_window.append((len(window), Counter(buckets)))
    return by_window


def test_one_all_reduce_per_bucket_and_window():
    for by_window in launch(all_reduces_by_window, True, timeout=60).values:
        assert [length for length, _ in by_window] == [2, 2, 1]
        for _, buckets in by_window:
            assert len(buckets) > 1
            assert set(buckets.values()) == {1}


def test_without_accumulate_one_all_reduce_per_bucket_and_micro_batch():
    for by_window in launch(all_reduces_by_window, False, timeout=60).values:
        for length, buckets in by_window:
            assert len(buckets) > 1
            assert set(buckets.values()) == {length}


def leave_early(how):
    """Return DDP's sync flag in the micro-batches seen and after leaving, and a later gradient."""
    me = this_rank()
    model = DistributedDataParallel(MLP(width=8).to(me.device))
    window = Window(make_batches("mlp", torch.float32, me.rank, me.device)[:3])
    seen, kept = [], None
    try:
        for number, (x, y) in enumerate(accumulate(model, window)):
            seen.append(model.require_backward_grad_sync)
            loss_of(model, x, y, "mean").backward()
            if how == "break" and number == 1:
                break
            if how == "raise" and number == 1:
                raise KeyError("in the middle")
    except KeyError as error:
        kept = error  # as a notebook keeps it, with its traceback
    flag = model.require_backward_grad_sync
    model.zero_grad()
    loss_of(model, *window[0], "mean").backward()
    return seen, flag, kept is not None, model.module[0].weight.grad


@pytest.mark.parametrize("how", ["to the end", "break", "raise"])
def test_leaving_accumulate_gives_the_sync_flag_back(how):
    (seen, flag, raised, gradient), (*_, other) = launch(leave_early, how, timeout=60).values
    assert seen == [False, False, True][: len(seen)]
    assert len(seen) == (3 if how == "to the end" else 2)
    assert raised == (how == "raise")
    assert flag is True
    assert torch.equal(gradient, other)


def break_inside_no_sync():
    model = DistributedDataParallel(MLP(width=8).to(this_rank().device))
    window = Window(make_batches("mlp", torch.float32, 0)[:2])
    with model.no_sync():
        for _ in accumulate(model, window):
            break
        inside = model.require_backward_grad_sync
    return inside, model.require_backward_grad_sync


def test_inside_the_students_own_no_sync_the_flag_stays_down():
    assert launch(break_inside_no_sync, timeout=60).values == [(False, True)] * 2


def test_windows_keep_order_and_the_ragged_end():
    batches = make_batches("mlp", torch.float32, 0)
    found = list(windows(batches, 2))
    assert [len(window) for window in found] == [2, 2, 1]
    assert [window.samples for window in found] == [8, 6, 1]
    flat = [batch for window in found for batch in window]
    assert all(mine is given for mine, given in zip(flat, batches, strict=True))


def test_text_is_counted_in_tokens_and_padding_by_your_own_count():
    y = torch.tensor([[1, 2, -100], [3, -100, -100]])
    (window,) = windows([(y, y)], 4)
    assert window.samples == 6
    (window,) = windows([(y, y)], 4, count=lambda y: (y != -100).sum())
    assert window.samples == 3


def test_windows_read_no_further_than_the_window():
    read = []
    loader = (read.append(n) or (torch.zeros(1), torch.zeros(1)) for n in range(9))
    next(windows(loader, 4))
    assert read == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [0, -1, 1.5, "2", True, None])
def test_bad_accumulation_steps_fail_before_the_loop(steps):
    with pytest.raises(ValueError, match="accumulation_steps must be a whole number of at least 1"):
        windows([], steps)


def divisor_of(counts):
    y = torch.zeros(counts[this_rank().rank])
    return Window([(y, y)]).divisor()


def test_divisor_is_the_global_count_over_the_world_size():
    assert launch(divisor_of, [7, 0, 3], nproc=3, timeout=60).values == [10 / 3] * 3
    y = torch.zeros(7)
    assert Window([(y, y)]).divisor() == 7  # no process group


def divisor_error():
    try:
        Window([]).divisor()
    except ValueError as error:
        return str(error)


def test_no_target_on_any_rank_is_an_error_on_every_rank():
    values = launch(divisor_error, timeout=60).values
    assert values == ["no rank has a target in this window: its mean loss does not exist."] * 2


def test_a_model_without_ddp_gets_every_micro_batch():
    batches = make_batches("mlp", torch.float32, 0)
    assert list(accumulate(MLP(), batches)) == batches
