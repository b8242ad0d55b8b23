"""Checkpoints: a resume equals never having stopped; a failed write costs nothing and is heard."""

import itertools
import os
import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddp_course import RankError, launch, this_rank
from ddp_course.accumulation import accumulate, windows
from ddp_course.amp import MixedPrecision
from ddp_course.checkpoint import load, save
from ddp_course.data import shard

EPOCHS = 2


def make_parts():
    """Everything a run has; each part with a state that moves within a few steps."""
    device = this_rank().device
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=0.01)
    amp = MixedPrecision("fp16", device, max_norm=1.0, init_scale=2.0**20, growth_interval=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return {"model": model, "optimizer": optimizer, "amp": amp, "scheduler": scheduler}


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def train(path=None, stop_at=None, resume=False, warm_up=False):
    """Return what each step saw, and the final state; stop at a step, or go on from the file."""
    me = this_rank()
    seed_all(1000 * resume + me.rank)  # a resumed run's own seeds are others: the file must win
    parts = make_parts()
    model = DistributedDataParallel(parts["model"])
    at = {"epoch": 0, "step": 0, "batches_done": 0}
    if warm_up:
        with parts["amp"].autocast():
            loss = model(torch.zeros(1, 64, device=me.device)).float().sum()
        loss.backward()
        parts["optimizer"].zero_grad()
    if resume:
        at = load(path, **(parts | {"model": model}))
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(110, 64, generator=numbers), torch.randint(10, (110,), generator=numbers)
    loader, log, step = shard(TensorDataset(x, y), 8), [], at["step"]
    for epoch in range(at["epoch"], EPOCHS):
        loader.sampler.set_epoch(epoch)
        done = at["batches_done"] if epoch == at["epoch"] else 0
        for window in windows(itertools.islice(loader, done, None), 2):
            divisor = window.divisor()
            for x, y in accumulate(model, window):
                with parts["amp"].autocast():
                    logits = model(x.to(me.device))
                    loss = F.cross_entropy(logits, y.to(me.device), reduction="sum") / divisor
                parts["amp"].backward(loss)
            result = parts["amp"].step(parts["optimizer"])
            if not result.skipped:
                parts["scheduler"].step()
            step, done = step + 1, done + len(window)
            drawn = (random.random(), numpy.random.rand(), torch.rand(()).item())
            log.append((step, loss.item(), parts["scheduler"].get_last_lr(), result, drawn))
            if step == stop_at:
                save(path, **(parts | {"model": model}), epoch=epoch, step=step, batches_done=done)
                return log, None
    return log, {name: part.state_dict() for name, part in parts.items()}


def same(one, other):
    """Whether two nested states are equal, bit for bit (a nan equals a nan)."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.fixture(scope="module", params=[2, 3])
def uninterrupted(request):
    ranks = launch(train, nproc=request.param, timeout=60).values
    scales = [result.loss_scale for *_, result, _ in ranks[0][0]]
    skips = [result.skipped for *_, result, _ in ranks[0][0]]
    assert len(set(scales)) > 2  # the scaler's state matters
    assert True in skips
    assert False in skips
    drawn = [[entry[-1] for entry in log] for log, _ in ranks]
    assert drawn[0] != drawn[1]  # each rank's generators are its own
    return ranks


# Of 4 (3 ranks: 3) windows an epoch: in the middle, at the ragged end, in the second epoch.
@pytest.mark.parametrize("stop_at", [2, 4, 5])
def test_resume_equals_never_having_stopped(tmp_path, uninterrupted, stop_at):
    path, nproc = tmp_path / "last.pt", len(uninterrupted)
    before = launch(train, path, stop_at, nproc=nproc, timeout=60).values
    after = launch(train, path, resume=True, warm_up=nproc > 2, nproc=nproc, timeout=60).values
    for rank, (log, final) in enumerate(uninterrupted):
        assert len(log) > 5
        assert same(before[rank][0], log[:stop_at])
        assert same(after[rank][0], log[stop_at:])
        assert same(after[rank][1], final)


def save_once(path, step=1, **options):
    """Save on this rank; return the error's text, or None."""
    seed_all(this_rank().rank)
    try:
        save(path, **make_parts(), step=step, **options)
    except RuntimeError as error:
        return str(error)


def test_load_returns_the_position_and_extra(tmp_path):
    path = tmp_path / "new folder" / "last.pt"
    extra = {"losses": [1.5, 0.5], "note": "ü", "weights": torch.arange(3), "none": None}
    save_once(path, step=7, epoch=2, batches_done=5, extra=extra)
    found = load(path, **make_parts())
    assert same(found, {"epoch": 2, "step": 7, "batches_done": 5, "extra": extra})
    assert os.listdir(path.parent) == ["last.pt"]


def save_with_ddp(path):
    model = nn.Linear(2, 3).to(this_rank().device)
    save(path, model=DistributedDataParallel(model), optimizer=sgd(model))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_saved_names_have_no_module_prefix(tmp_path):
    launch(save_with_ddp, tmp_path / "last.pt", timeout=60)
    weights = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    assert list(weights) == ["weight", "bias"]
    nn.Linear(2, 3).load_state_dict(weights)


class FailsWhenPickled:
    """Stands for whatever goes wrong once the file is open."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


class DiesWhenPickled:
    def __reduce__(self):
        os._exit(9)


class NotPlainData:
    pass


def save_badly(path, how):
    if how == "dies before the rename":
        os.replace = lambda *paths: os._exit(9)
    classes = {"fails": FailsWhenPickled, "dies": DiesWhenPickled, "unreadable": NotPlainData}
    return save_once(path, step=2, extra=classes.get(how, str)())


@pytest.mark.parametrize(
    "how, reason",
    [
        ("fails", "No space left on device"),
        ("unreadable", "holds more than numbers, strings, tensors, lists and dicts"),
    ],
)
def test_a_failed_write_keeps_the_old_file_and_raises_on_every_rank(tmp_path, how, reason):
    path = tmp_path / "last.pt"
    launch(save_once, path, timeout=60)
    old = path.read_bytes()
    for error in launch(save_badly, path, how, nproc=3, timeout=60).values:
        assert error.startswith(f"checkpoint {path} was not written: ")
        assert reason in error
        assert "\n" not in error
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["last.pt"]


def test_a_folder_that_cannot_be_written_raises_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("no folder")
    errors = launch(save_once, tmp_path / "file" / "last.pt", timeout=60).values
    assert all("was not written" in error and "\n" not in error for error in errors)


@pytest.mark.parametrize("how", ["dies", "dies before the rename"])
def test_a_rank_killed_in_the_middle_keeps_the_old_file(tmp_path, how):
    path = tmp_path / "last.pt"
    launch(save_once, path, timeout=60)
    old = path.read_bytes()
    with pytest.raises(RankError):
        launch(save_badly, path, how, timeout=60)
    assert path.read_bytes() == old
    assert launch(save_once, path, step=3, timeout=60).values == [None, None]
    assert path.read_bytes() != old
    assert os.listdir(tmp_path) == ["last.pt"]  # nothing left behind for good


def load_once(path, **parts):
    try:
        load(path, **(make_parts() | parts))
    except (ValueError, RuntimeError, OSError) as error:
        return type(error), str(error)


def test_another_world_size_is_refused_on_every_rank(tmp_path):
    path = tmp_path / "last.pt"
    launch(save_once, path, timeout=60)
    expected = f"{path} was saved by 2 rank(s), this run has 3: a resume needs the same number"
    for kind, error in launch(load_once, path, nproc=3, timeout=60).values:
        assert kind is ValueError
        assert error.startswith(expected)
        assert "\n" not in error


@pytest.mark.parametrize("share", [0, 0.001, 0.1, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_one_clear_line(tmp_path, share):
    path = tmp_path / "last.pt"
    save_once(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    kind, error = load_once(path)
    assert kind is RuntimeError
    assert error.startswith(f"{path} is damaged")
    assert "\n" not in error


def test_a_foreign_file_is_one_clear_line(tmp_path):
    path = tmp_path / "last.pt"
    contents = (nn.Linear(2, 3).state_dict(), {"model": {}}, [1], torch.ones(2))
    for content in contents:
        torch.save(content, path)
        expected = (RuntimeError, f"{path} was not written by ddp_course.checkpoint.save")
        assert load_once(path) == expected
    path.write_text("step,loss\n1,0.5\n")
    assert load_once(path)[1].startswith(f"{path} is damaged")


def test_a_missing_file_says_so(tmp_path):
    kind, error = load_once(tmp_path / "last.pt")
    assert kind is FileNotFoundError
    assert "last.pt" in error


@pytest.mark.parametrize(
    "saved, loaded, message",
    [
        ({"amp": None}, {}, "has no state for `amp`"),
        ({"scheduler": None}, {}, "has no state for `scheduler`"),
        ({}, {"amp": None}, "has a state for `amp`"),
        ({}, {"scheduler": None}, "has a state for `scheduler`"),
        ({}, {"model": nn.Linear(64, 10)}, "is a checkpoint of another model: .*weight"),
        ({}, {"amp": MixedPrecision("bf16")}, "saved with precision 'fp16', this run uses 'bf16'"),
        ({}, {"optimizer": sgd(nn.Linear(2, 3))}, "doesn't match the size"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_clear_line(tmp_path, saved, loaded, message):
    save(tmp_path / "last.pt", **(make_parts() | saved))
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path / "last.pt", **(make_parts() | loaded))
    assert "\n" not in str(caught.value)
