"""14 · capstone(model, train_set, test_set, plan): a script for one process, made distributed."""

import contextlib
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Subset

from ... import data, models
from ..exercise import Case, Exercise, calls
from . import capstone_judges as judges
from .capstone import (
    TEST,
    TEXT_CONTEXT,
    TRAIN,
    Crash,
    Sequences,
    mean_loss,
    model_of,
    plan_of,
)
from .capstone_judges import wrong_names  # by name: what runs on ranks travels alone

SIXTEEN = {"precision": "fp16", "epochs": 6, "init_scale": 2.0**18}  # a scale too high at first
PAUSE = 0.004  # seconds an item takes: reading decides the throughput that is to be measured
WIDTH, SEQUENCES, BATCH = 64, 1920, 4  # of the real text


# ---- what runs on the ranks


def _told(result) -> dict:
    """Return what a submission returned, as plain data, or what is wrong with its form."""
    if not isinstance(result, dict):
        kinds = "nothing" if result is None else f"a {type(result).__name__}"
        return {"wrong": f"it returns {kinds}, and should return a dict."}
    missing = [name for name in KEYS if name not in result]
    if missing:
        return {"wrong": f"the dict it returns lacks {', '.join(missing)}."}
    weights = result["weights"]
    if not hasattr(weights, "items"):
        return {"wrong": f"the weights are a {type(weights).__name__}, no state_dict."}
    return {
        "weights": {str(name): torch.as_tensor(w).detach().clone() for name, w in weights.items()},
        "losses": [float(loss) for loss in result["losses"]],
        "test_loss": float(result["test_loss"]),
        "tokens_per_s": float(result["tokens_per_s"]),
    }


KEYS = ("weights", "losses", "test_loss", "tokens_per_s")


def _run(**other):
    def run(fn, rank, world_size, seed):
        torch.set_num_threads(1)  # for tiny tensors
        model = model_of(seed, rank)
        plan = plan_of(seed, **other)
        model = model.double() if plan.precision == "fp32" else model
        called = len(calls())
        told = _told(fn(model, Sequences(seed, TRAIN), Sequences(seed + 1, TEST), plan))
        return told | {"collectives": calls()[called:]}

    return run


def _run_stopped(fn, rank, world_size, seed):
    """Train with a checkpoint, crash in the third epoch, and start again."""
    share = -(-TRAIN // world_size)
    with _shared_folder(rank) as folder:
        plan = plan_of(seed, checkpoint=os.path.join(folder, "run.pt"))
        test = Sequences(seed + 1, TEST)
        first = Sequences(seed, TRAIN, crash_at=2 * share + 1)
        try:
            fn(model_of(seed, rank).double(), first, test, plan)
            return {"wrong": f"it never asked for item {first.crash_at} of train_set."}
        except Crash:
            pass
        dist.barrier()
        if not os.path.exists(plan.checkpoint):
            return {"wrong": "stopped in the third epoch, and no file at plan.checkpoint."}
        again = Sequences(seed, TRAIN)
        told = _told(fn(model_of(seed + 7, rank).double(), again, test, plan))
        return told | {"asked": again.asked, "share": share}


@contextlib.contextmanager
def _shared_folder(rank):
    box = [None]
    if rank == 0:  # a grader's folder for this submission, which was named after tempfile looked
        box = [tempfile.mkdtemp(prefix="capstone-", dir=os.environ.get("TMPDIR"))]
    dist.broadcast_object_list(box)
    try:
        yield box[0]
        dist.barrier()
    finally:
        if rank == 0:
            shutil.rmtree(box[0], ignore_errors=True)


def _run_text(fn, rank, world_size, seed):
    torch.set_num_threads(1)
    train, test = data.characters(context=TEXT_CONTEXT)
    train, test = Subset(train, range(SEQUENCES)), Subset(test, range(101))
    torch.manual_seed(seed + rank)
    model = models.GPT(len(train.dataset.vocabulary), context=TEXT_CONTEXT, width=WIDTH, layers=2)
    plan = plan_of(
        seed, epochs=1, micro_batch=BATCH, learning_rate=0.005, warmup_steps=8, precision="bf16"
    )
    told = _told(fn(model, train, test, plan))
    if "wrong" in told:
        return told
    weights = told.pop("weights")
    if wrong := wrong_names(weights, model.state_dict()):
        return {"wrong": wrong}
    model.load_state_dict(weights)
    with torch.no_grad():
        numbers = [torch.cat([x, y[-1:]]) for x, y in test]
        told["really"] = mean_loss(model, torch.stack(numbers)).item()
    return told


def _run_paused(fn, rank, world_size, seed):
    slow = Sequences(seed, TRAIN, pause=PAUSE * (1 + rank))
    told = _told(fn(model_of(seed, rank).double(), slow, Sequences(seed + 1, TEST), plan_of(seed)))
    return told | {"seconds": slow.times[-1] - slow.times[0] + slow.pause}


# ---- the cases


STUCK = (
    "Likely: a collective that not all ranks call, as one inside `if rank == 0`, or a loop in "
    "which some ranks have more batches than others."
)
FILES = "Likely: a checkpoint that all ranks write, or that one reads before it is whole."
ERRORS = {
    "mutually exclusive": "A loader takes either a sampler or shuffle=True.",
    "FileNotFound|EOFError|PytorchStreamReader|Unpickling|[Zz]ip": FILES,
}


def _case(title, points, run, judge, worlds) -> Case:
    return Case(title, points, run, judge, worlds, STUCK, ERRORS)


EXERCISE = Exercise(
    "14_capstone",
    "capstone",
    ("model", "train_set", "test_set", "plan"),
    (
        _case("one rank", 4, _run(), judges.judged_by(judges.wrong_weights), (1,)),
        _case("ranks together", 4, _run(), judges.judged_by(judges.wrong_weights), (2, 3)),
        _case("the loss of each step", 2, _run(), judges.judged_by(judges.wrong_losses), (2,)),
        _case("one all-reduce a window", 2, _run(), judges.judged_by(judges.wrong_calls), (2,)),
        _case("the test loss", 2, _run(), judges.judged_by(judges.wrong_test_loss), (3,)),
        _case(
            "fp16, with overflows", 3, _run(**SIXTEEN),
            judges.judged_by(judges.wrong_16, **SIXTEEN), (2,),
        ),
        _case(
            "stopped, and started again", 4, _run_stopped,
            judges.judged_by(judges.wrong_resume), (2,),
        ),
        _case("tokens per second", 2, _run_paused, judges.wrong_throughput, (3,)),
        _case("real text", 2, _run_text, judges.wrong_text, (2,)),
    ),
)  # fmt: skip
