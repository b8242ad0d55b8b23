"""What can be added to a training: shards instead of replicas, compressed gradients, logs."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist

from ddp_course import compression, data, flight, fsdp, launch, logs, models
from ddp_course.accumulation import accumulate, windows
from ddp_course.train import Settings, run

SHORT = Settings(epochs=2, accumulation_steps=2)


def losses(run):
    return [record["loss"] for record in run.records if record["rank"] == 0]


@pytest.mark.parametrize(("precision", "nproc"), [("fp32", 2), ("fp32", 3), ("fp16", 2)])
def test_shards_learn_what_replicas_learn(precision, nproc):
    # fp16: a first overflow on the way, at the same steps
    settings = dataclasses.replace(SHORT, precision=precision, init_scale=2.0**20)
    replicas = launch(run, settings, nproc=nproc, timeout=60)
    shards = launch(run, dataclasses.replace(settings, strategy="fsdp"), nproc=nproc, timeout=60)
    assert losses(shards) == pytest.approx(losses(replicas), abs=1e-3)  # sums in another order
    for name in ("loss_scale", "skipped", "samples"):
        told = [[r[name] for r in done.records if r["rank"] == 0] for done in (shards, replicas)]
        assert told[0] == told[1]
    expected = replicas.values[0]["weights"]
    for value in shards.values:
        assert value["accuracy"] == pytest.approx(replicas.values[0]["accuracy"], abs=0.01)
        for name, weight in value["weights"].items():
            assert weight.shape == expected[name].shape and type(weight) is torch.Tensor
            assert (weight - expected[name]).abs().max() < 5e-3


def a_gpt_in_shards():
    """Return (local, whole) numbers of parameters, and the collectives of a window of three."""
    text, _ = data.characters()
    torch.manual_seed(0)
    model = models.build("gpt", vocabulary=len(text.vocabulary))
    whole = sum(p.numel() for p in model.parameters())
    fsdp.shard(model)
    local = sum(p.to_local().numel() for p in model.parameters())
    (window,) = windows([next(iter(data.shard(text, 4)))] * 3, 3)
    before = len(flight.log())
    for x, y in accumulate(model, window):
        torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    return local, whole, [str(collective) for collective in flight.log()[before:]]


def test_a_rank_holds_its_share_and_reduces_once_a_window():
    done = launch(a_gpt_in_shards, nproc=2, timeout=60)
    assert sum(local for local, _, _ in done.values) == pytest.approx(done.values[0][1], rel=0.01)
    for _, _, calls in done.values:
        reduced = [number for number, call in enumerate(calls) if "reduce" in call]
        # after the last backward only: two blocks, and what is left of the model
        assert reduced == [len(calls) - 3, len(calls) - 2, len(calls) - 1]


@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_fits_shards_and_replicas(tmp_path, before, after):
    whole = launch(run, dataclasses.replace(SHORT, strategy=after), nproc=2, timeout=60)
    first = dataclasses.replace(SHORT, strategy=before, checkpoint=str(tmp_path / "run.pt"))
    launch(stop_in_the_second_epoch, first, nproc=2, timeout=60)
    again = launch(
        run, dataclasses.replace(first, strategy=after, resume=True), nproc=2, timeout=60
    )
    mine, expected = losses(again), losses(whole)[-len(losses(again)) :]
    assert 0 < len(mine) < len(losses(whole))
    assert mine == (expected if before == after else pytest.approx(expected, abs=1e-3))


def stop_in_the_second_epoch(settings):
    def tell(**record):
        if record["epoch"] == 1:
            raise StopIteration

    try:
        run(settings, tell)
    except StopIteration:
        return


def test_a_checkpoint_of_another_model_is_refused_by_shards(tmp_path):
    path = str(tmp_path / "run.pt")
    launch(other_model, path, True, nproc=2, timeout=60)
    said = launch(other_model, path, False, nproc=2, timeout=60).values
    assert all("another model: names or shapes of the weights differ" in line for line in said)


def other_model(path, save):
    from ddp_course import checkpoint

    model = fsdp.shard(models.build("mlp", width=32 if save else 64))
    parts = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    if save:
        checkpoint.save(path, **parts)
        return None
    try:
        checkpoint.load(path, **parts)
    except ValueError as error:
        return str(error)


def calls_of_a_step(kind):
    """Return the collectives of a first step with this compression."""
    told = []

    def tell(**record):
        told.extend(str(c) for c in flight.log())
        raise StopIteration

    try:
        run(dataclasses.replace(SHORT, compression=kind), tell)
    except StopIteration:
        return told


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", "float32"), ("fp16", "float16"), ("bf16", "bfloat16"), ("powersgd", "float32")],
)
def test_gradients_go_out_as_asked(name, kind):
    (first, _) = launch(calls_of_a_step, name, nproc=2, timeout=60).values
    weights = sum(p.numel() for p in models.build("mlp").parameters())
    assert any(f"all_reduce({kind}[{weights}])" in call for call in first), first


@pytest.mark.parametrize("name", compression.COMPRESSIONS[1:])
def test_compressed_gradients_train_all_ranks_alike(name):
    settings = dataclasses.replace(SHORT, epochs=4, compression=name)
    done = launch(run, settings, nproc=2, timeout=60)
    first, second = (value["weights"] for value in done.values)
    assert all(torch.equal(first[name], second[name]) for name in first)
    plain = launch(run, dataclasses.replace(SHORT, epochs=4), nproc=2, timeout=60)
    assert losses(done)[-1] < losses(done)[0] / 2
    assert losses(done) != losses(plain)  # it does lose something


def numbers_of_each_step():
    """Return how many numbers were all-reduced up to each step."""
    sent = []

    def tell(**record):
        shapes = [
            re.findall(r"\d+(?=[,\]])", str(c)) for c in flight.log() if "all_reduce" in str(c)
        ]
        sent.append(sum(math.prod(map(int, shape)) for shape in shapes))

    run(dataclasses.replace(SHORT, compression="powersgd"), tell)
    return sent


def test_powersgd_sends_less_once_it_has_begun():
    sent, _ = launch(numbers_of_each_step, nproc=2, timeout=60).values
    steps = [after - before for before, after in itertools.pairwise([0, *sent])]
    assert steps[compression.FIRST_STEPS - 1] > 85_000 > 10 * steps[-1] > 0


def test_powersgd_has_one_bucket_where_several_would_be_mixed_up():
    # the GPT's gradients are two buckets by default: without the one, ranks hang or abort
    few = Settings(task="text", micro_batch=4, compression="powersgd")
    first, second = launch(losses_of_a_few_steps, few, nproc=2, timeout=60).values
    assert first == second and first[-1] < first[0]


def losses_of_a_few_steps(settings):
    told = []

    def tell(**record):
        told.append(record["loss"])
        if len(told) == compression.FIRST_STEPS + 5:
            raise StopIteration

    try:
        run(settings, tell)
    except StopIteration:
        return told


def test_logs_hold_each_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = dataclasses.replace(SHORT, tensorboard=str(tmp_path / "logs"))
    done = launch(run, settings, nproc=2, timeout=60)
    assert len(list((tmp_path / "logs").iterdir())) == 1  # one rank writes
    board = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert set(board.Tags()["scalars"]) == set(logs.SCALARS)
    written = [(event.step, event.value) for event in board.Scalars("loss")]
    assert written == [(n, pytest.approx(x, rel=1e-6)) for n, x in enumerate(losses(done))]


def test_without_tensorboard_logs_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install tensorboard\.$"):
        dataclasses.replace(SHORT, tensorboard="logs").check()


def test_without_a_process_group_it_is_one_model():
    assert not dist.is_initialized()
    plain, sharded = (run(dataclasses.replace(SHORT, epochs=1, strategy=s), lambda **_: None)
                      for s in ("ddp", "fsdp"))  # fmt: skip
    assert plain["test_loss"] == sharded["test_loss"]
