"""The training loop as a whole: equal weights and losses however it is started, resume."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_course import RankError, data, launch, models
from ddp_course.amp import MixedPrecision
from ddp_course.settings import Settings
from ddp_course.train import evaluate, run, train, warmup_then_cosine

SHORT = Settings(epochs=2, micro_batch=64, accumulation_steps=2)


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_weights_are_identical_on_all_ranks_after_training(nproc):
    done = launch(run, SHORT, nproc=nproc, timeout=120)
    first, *others = (value["weights"] for value in done.values)
    assert all(equal(first, other) for other in others)
    assert len({value["accuracy"] for value in done.values}) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_digits_are_learned(precision):
    done = launch(run, Settings(precision=precision), timeout=120)
    assert done.values[0]["accuracy"] >= 0.96


def test_records_tell_what_happened():
    done = launch(run, SHORT, timeout=60)
    records = [record for record in done.records if record["rank"] == 0]
    steps_per_epoch = math.ceil(math.ceil(1437 / 2 / 64) / 2)  # 12 micro-batches a rank, 6 windows
    assert [record["step"] for record in records] == list(range(2 * steps_per_epoch))
    assert [record["epoch"] for record in records] == [0] * steps_per_epoch + [1] * steps_per_epoch
    assert sum(record["samples"] for record in records) == 2 * 1438  # 1437 and one that comes twice
    for record in records:
        assert record["samples_per_s"] == pytest.approx(record["samples"] / record["seconds"])
        assert record["grad_norm"] > 0 and record["loss_scale"] == 1 and not record["skipped"]


def test_the_loss_shown_is_the_global_one():
    """The mean of both ranks' own losses, weighted by their samples: here equal."""
    done = launch(run, SHORT, timeout=60)
    by_step = {}
    for record in done.records:
        by_step.setdefault(record["step"], []).append(record)
    for first, second in by_step.values():
        assert first["loss"] == second["loss"]
        assert first["local_loss"] != second["local_loss"]
        assert first["loss"] == pytest.approx((first["local_loss"] + second["local_loss"]) / 2)


@pytest.mark.parametrize(
    ("nproc", "micro_batch", "steps"), [(1, 32, 4), (2, 32, 2), (2, 16, 4), (4, 32, 1)]
)
def test_ranks_and_accumulation_do_not_change_what_is_learned(nproc, micro_batch, steps):
    """128 samples a step, however they are cut, equal one process on the whole batch (float64)."""

    def learn(micro_batch, steps):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        train_set, _ = data.digits()
        x, y = train_set.tensors
        # 1424 = 11 × 128 + 16
        everything = torch.utils.data.TensorDataset(x[:1424].double(), y[:1424])
        loader = data.shard(everything, micro_batch, shuffle=False)
        model = models.build("mlp", width=32)
        if dist.get_world_size() > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        amp = MixedPrecision(max_norm=1.0)
        losses = [
            record["loss"]
            for record in train(
                model, loader, optimizer, amp, schedule, epochs=1, accumulation_steps=steps
            )
        ]
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()])

    # DistributedSampler deals item i to rank i % world_size, so window k holds the same 128 items
    losses, weights = launch(learn, micro_batch, steps, nproc=nproc, timeout=60).values[0]
    expected_losses, expected = launch(learn, 128, 1, nproc=1, timeout=60).values[0]
    assert len(losses) == 12  # the ragged last window of 16 is there
    assert losses == pytest.approx(expected_losses, abs=1e-6)  # carried as float32
    assert (weights - expected).abs().max() < 1e-10


def stop_after_an_epoch(settings):
    """Train, and stop after the first epoch's checkpoint; return the records of that epoch."""
    steps = []

    def tell(**record):
        steps.append(record)
        if record["epoch"] == 1:
            raise StopIteration

    try:
        run(settings, tell)
    except StopIteration:
        return steps[:-1]


@pytest.mark.parametrize(("precision", "nproc"), [("fp32", 2), ("fp16", 2), ("fp32", 3)])
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path, precision, nproc):
    settings = Settings(epochs=2, precision=precision, init_scale=2.0**20, growth_interval=5)
    whole = launch(run, settings, nproc=nproc, timeout=60)
    file = str(tmp_path / "run.pt")
    stopped = dataclasses.replace(settings, checkpoint=file)
    first = launch(stop_after_an_epoch, stopped, nproc=nproc, timeout=60).values[0]
    again = dataclasses.replace(settings, checkpoint=file, resume=True)
    resumed = launch(run, again, nproc=nproc, timeout=60)
    assert equal(resumed.values[0]["weights"], whole.values[0]["weights"])
    told = first + [record for record in resumed.records if record["rank"] == 0]
    expected = [record for record in whole.records if record["rank"] == 0]
    for name in ("step", "loss", "learning_rate", "loss_scale", "skipped"):
        assert [record[name] for record in told] == [record[name] for record in expected]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_a_run_goes_on_with_other_ranks_on_the_same_global_batches(tmp_path, before, after):
    settings = Settings(epochs=2, accumulation_steps=2, ranks=2)
    whole = launch(run, settings, nproc=before, timeout=60)
    stopped = dataclasses.replace(settings, checkpoint=str(tmp_path / "run.pt"))
    launch(stop_after_an_epoch, stopped, nproc=before, timeout=60)
    resumed = launch(run, dataclasses.replace(stopped, resume=True), nproc=after, timeout=60)
    told = [record for record in resumed.records if record["rank"] == 0]
    expected = [record for record in whole.records if record["rank"] == 0][-len(told) :]
    assert [r["step"] for r in told] == [r["step"] for r in expected]
    assert [r["learning_rate"] for r in told] == [r["learning_rate"] for r in expected]
    # but for the sample or three with which the last window of an epoch is padded
    losses = [[record["loss"] for record in records] for records in (told, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=0.05)
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)


def test_a_run_resumes_in_the_middle_of_an_epoch():
    def learn(stop_after):
        """Train five windows; with `stop_after`, as two generators that share the model."""
        torch.manual_seed(0)
        train_set, _ = data.digits()
        loader = data.shard(torch.utils.data.Subset(train_set, range(300)), 32, seed=3)
        model = DistributedDataParallel(models.build("mlp", width=16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = warmup_then_cosine(optimizer, 2, 6)
        parts = (model, loader, optimizer, MixedPrecision(), schedule)
        kept, done = [], (0, 0, 0)
        if stop_after:
            for record in train(*parts, epochs=2, accumulation_steps=2):
                kept.append(record["loss"])
                done = (record["epoch"], record["step"] + 1, record["batches_done"])
                if len(kept) == stop_after:
                    break
        kept += [r["loss"] for r in train(*parts, epochs=2, accumulation_steps=2, done=done)]
        return kept

    without, with_stop = (launch(learn, n, timeout=60).values[0] for n in (0, 2))
    assert with_stop == without and len(without) == 6


def test_evaluation_counts_every_item_once():
    """361 items on two ranks: a padding sampler would count one twice."""

    def worker():
        _, test_set = data.digits()
        x, y = test_set.tensors
        odd = torch.utils.data.TensorDataset(x[:359], y[:359])
        torch.manual_seed(0)
        model = models.build("mlp")
        return evaluate(model, data.exact_shard(odd, 50), MixedPrecision())

    one, two, three = (launch(worker, nproc=n, timeout=60).values for n in (1, 2, 3))
    accuracy = one[0][1]
    assert accuracy == round(accuracy * 359) / 359
    for value in (*two, *three):
        assert value == pytest.approx(one[0], abs=1e-6)


def _one_step_on_unequal_parts(lengths, sizes):
    length, size = lengths[dist.get_rank()], sizes[dist.get_rank()]
    items = torch.utils.data.TensorDataset(torch.randn(length, 4), torch.zeros(length).long())
    loader = torch.utils.data.DataLoader(items, batch_size=size)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = warmup_then_cosine(optimizer, 1, 10)
    before = model.module.weight.detach().clone()
    with pytest.raises(ValueError, match="unequal parts") as caught:
        next(train(model, loader, optimizer, MixedPrecision("fp32"), scheduler, epochs=1))
    assert torch.equal(before, model.module.weight)
    return str(caught.value)


@pytest.mark.parametrize(("lengths", "sizes"), [((8, 9), (4, 4)), ((8, 8), (4, 2))])
def test_unequal_parts_are_refused_on_every_rank_before_a_step(lengths, sizes):
    """A rank divides by its own count: with unequal ones DDP averages wrongly."""
    lines = launch(_one_step_on_unequal_parts, lengths, sizes, timeout=60).values
    assert len(set(lines)) == 1 and "data.shard" in lines[0]
    for rank in (0, 1):
        assert f"rank {rank}: {lengths[rank]} items by {sizes[rank]}" in lines[0]


def test_a_skipped_step_does_not_advance_the_schedule():
    settings = dataclasses.replace(SHORT, precision="fp16", init_scale=2.0**24)
    records = [r for r in launch(run, settings, timeout=60).records if r["rank"] == 0]
    skipped = [record for record in records if record["skipped"]]
    assert 2 <= len(skipped) < len(records) and skipped == records[: len(skipped)]
    first = records[0]["learning_rate"]
    assert {record["learning_rate"] for record in records[: len(skipped) + 1]} == {first}
    assert records[len(skipped) + 1]["learning_rate"] > first
    scales = [record["loss_scale"] for record in skipped]
    assert scales == [2.0 ** (24 - k) for k in range(len(skipped))]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"task": "images"}, "unknown task 'images'"),
        ({"model": "gpt"}, "model 'gpt' does not fit task 'digits'"),
        ({"epochs": 0}, "epochs must be above 0"),
        ({"learning_rate": -1.0}, "learning_rate must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate must be above 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"resume": True}, "give --checkpoint FILE as well"),
        ({"strategy": "zero"}, "unknown strategy 'zero': choose from ddp, fsdp"),
        ({"compression": "zip"}, "unknown compression 'zip': choose from none, fp16"),
        ({"strategy": "fsdp", "compression": "fp16"}, "none with strategy fsdp"),
    ],
)
def test_bad_settings_are_one_clear_line(change, line):
    with pytest.raises(ValueError, match=line) as caught:
        Settings(**change)
    assert "\n" not in str(caught.value)


def test_a_resume_with_other_settings_is_refused(tmp_path):
    settings = Settings(epochs=1, micro_batch=64, checkpoint=str(tmp_path / "run.pt"))
    launch(run, settings, timeout=60)
    other = dataclasses.replace(settings, resume=True, learning_rate=1e-5)
    with pytest.raises(RankError, match="learning_rate=0.002, not 1e-05"):
        launch(run, other, timeout=60)


def test_a_file_that_is_there_is_not_replaced(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(RankError, match="exists: --resume goes on from it"):
        launch(run, dataclasses.replace(SHORT, checkpoint=str(notes)), timeout=60)
    assert notes.read_text() == "mine"


# as a script


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def losses(text: str) -> list[str]:
    return re.findall(r"loss (\d+\.\d+)", text)


def test_torchrun_and_ddp_course_train_give_the_same_losses():
    options = ["--epochs", "1", "--precision", "bf16", "--accumulation-steps", "2", "--seed", "3"]
    ours = command("ddp_course", "train", "--nproc", "2", "--every", "1", *options)
    theirs = command(
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "ddp_course.train",
        *options,
    )
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    assert losses(ours.stdout) == losses(theirs.stdout)
    assert len(losses(ours.stdout)) == 12 + 1  # steps, and the test loss


def test_one_process_needs_no_launcher():
    done = command("ddp_course.train", "--epochs", "1")
    assert done.returncode == 0 and "test accuracy" in done.stdout
    assert done.stdout.count("step") == 45


def test_the_text_task_trains_a_gpt():
    settings = Settings(
        task="text", epochs=1, micro_batch=8, accumulation_steps=2, precision="bf16"
    )

    def few():
        seen = []

        def tell(**record):
            seen.append(record["loss"])
            if len(seen) == 20:
                raise StopIteration

        try:
            run(settings, tell)
        except StopIteration:
            return seen

    first, *_, last = launch(few, timeout=120).values[0]
    assert last < first - 0.5


def test_a_picture_is_saved(tmp_path):
    file = tmp_path / "out.png"
    done = command(
        "ddp_course", "train", "--epochs", "1", "--precision", "fp16", "--plot", str(file)
    )
    assert done.returncode == 0, done.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--precision", "fp8"], "--precision: invalid choice: 'fp8'"),
        (["--model", "cnn", "--precision", "fp16"], "fp16 convolutions on a CPU"),
        (["--nproc", "0"], "at least one rank"),
        (["--nproc", "two"], "--nproc: invalid int value"),
        (["--epochs", "-3"], "epochs must be above 0"),
        (["--plot", "out.bmp"], "must end in .png"),
        (["--plot", "no/such/place.png"], "cannot write there"),
        (["--tyop", "1"], "unknown option --tyop"),
        (["--checkpoint", __file__], "exists: --resume goes on from it"),
        (["--checkpoint", __file__ + "/run.pt"], "cannot be written there"),
        (["--epochs", "2", "--resume"], "give --checkpoint FILE as well"),
        (["--prec", "bf16"], "unknown option --prec"),
        (["--nproc", "3", "--ranks", "2"], "1 × 2 micro-batches (accumulation_steps × ranks)"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(arguments, line):
    if "fp16" in arguments and torch.cuda.is_available():
        arguments, line = ["--precision", "fp8"], "invalid choice"
    done = command("ddp_course", "train", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert line in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["ddp_course", "ddp_course.train"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04junk"])
def test_a_damaged_checkpoint_is_one_line(tmp_path, module, content):
    file = tmp_path / "broken.pt"
    file.write_bytes(content)
    train = ["train"] if module == "ddp_course" else []
    done = command(module, *train, "--checkpoint", str(file), "--resume")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "broken.pt is damaged" in done.stderr


def test_a_failing_rank_gives_exit_code_1(tmp_path):
    done = command("ddp_course", "train", "--timeout", "0.01")
    assert done.returncode == 1 and "no result after 0.01 s" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["train"], ["doctor"], ["lab"]])
def test_help_everywhere(arguments):
    done = command("ddp_course", *arguments, "--help")
    assert done.returncode == 0 and "usage: ddp-course" in done.stdout


def test_a_bare_command_says_what_there_is():
    done = command("ddp_course")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "COMMAND" in done.stderr


def test_interrupt_stops_the_ranks(tmp_path):
    import signal

    import psutil

    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_course", "train", "--epochs", "10000", "--every", "1"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert "step" in process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.stdout.read()
    assert process.wait(10) == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert len(family) >= 4 and not alive
