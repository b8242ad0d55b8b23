"""Wrong and right answers to 09_resume: what each is told."""

import io
import json
import os
import pickle

import torch
import torch.distributed as dist

from . import answers

WRONG, RIGHT, wrong, right = answers()


def bare(model):
    return getattr(model, "module", model)


def collect(model, optimizer, schedule, scaler, progress):
    return {
        "model": bare(model).state_dict(),
        "optimizer": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "scaler": scaler.state_dict(),
        "progress": dict(progress),
        "random": torch.get_rng_state(),
    }


def put_back(state, model, optimizer, schedule, scaler, progress):
    bare(model).load_state_dict(state["model"])
    for name, part in (("optimizer", optimizer), ("schedule", schedule), ("scaler", scaler)):
        if name in state:
            part.load_state_dict(state[name])
    progress.update(state.get("progress", {}))
    if "random" in state:
        torch.set_rng_state(state["random"])


def write(state, path):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def file_of(folder, rank=None):
    return os.path.join(folder, f"rank{dist.get_rank() if rank is None else rank}.pt")


def without(*names, change=lambda state: None, read_from=None, put=put_back):
    """One file a rank, without some of the parts, or with a changed state."""

    def checkpoints(folder, *parts):
        def save():
            state = collect(*parts)
            for name in names:
                del state[name]
            change(state)
            write(state, file_of(folder))
            dist.barrier()

        def load():
            put(torch.load(file_of(folder, read_from)), *parts)

        return save, load

    return checkpoints


def add(name, message, *names, **change):
    fn = without(*names, **change)
    fn.__name__ = name
    WRONG[fn] = message


def only_the_scale(state):
    state["scaler"] |= {"_growth_tracker": 0}


def only_the_epoch(state):
    del state["progress"]["batches_done"]


def only_the_batches(state):
    del state["progress"]["epoch"]


def on_rank_0_only(state, *parts):
    if dist.get_rank() == 0:
        put_back(state, *parts)


add("no_optimizer", "the optimizer begins without its momentum", "optimizer")
add("no_schedule", "the schedule has counted 0 steps instead of", "schedule")
add("no_scaler", "the loss scale is 2,097,152 instead of", "scaler")
add("no_count", "its scale alone is not its state", change=only_the_scale)
add("no_progress", "progress is still at epoch 0, batch 0", "progress")
add("no_batches", "its first samples are used twice", change=only_the_epoch)
add("no_epoch", "the sampler deals that epoch's order again", change=only_the_batches)
add("no_random", "dropout draws other numbers", "random")
add("only_weights", "only the weights are restored",
    "optimizer", "schedule", "scaler", "progress", "random")  # fmt: skip
add("file_of_rank_0", "it goes on with rank 0's random numbers", read_from=0)
add("loads_on_rank_0", "restores nothing here, but does on rank 0", put=on_rank_0_only)
add("loads_nothing", "load() changes nothing", put=lambda state, *parts: None)


@wrong("do all ranks write the same file")
def one_file_in_turns(folder, *parts):
    path = os.path.join(folder, "checkpoint.pt")

    def save():
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                write(collect(*parts), path)
            dist.barrier()

    return save, lambda: put_back(torch.load(path), *parts)


@wrong("save() returns before rank0.pt is there")
def without_a_barrier(folder, *parts):
    return (
        lambda: write(collect(*parts), file_of(folder)),
        lambda: put_back(torch.load(file_of(folder)), *parts),
    )


@wrong("a file that this rank looks for and none has written")
def only_rank_0_writes(folder, *parts):
    def save():
        if dist.get_rank() == 0:
            write(collect(*parts), file_of(folder))
        dist.barrier()

    return save, lambda: put_back(torch.load(file_of(folder)), *parts)


@wrong("Likely: a barrier or another collective inside")
def barrier_on_rank_0(folder, *parts):
    def save():
        write(collect(*parts), file_of(folder))
        if dist.get_rank() == 0:
            dist.barrier()

    return save, lambda: put_back(torch.load(file_of(folder)), *parts)


@wrong("begin with module.")
def saves_the_wrapper(folder, model, optimizer, schedule, scaler, progress):
    def save():
        state = collect(model, optimizer, schedule, scaler, progress)
        write(state | {"model": model.state_dict()}, file_of(folder))
        dist.barrier()

    def load():
        state = torch.load(file_of(folder))
        model.load_state_dict(state.pop("model"))
        inner = bare(model).state_dict()
        put_back(state | {"model": inner}, model, optimizer, schedule, scaler, progress)

    return save, load


@wrong("write beside the old file")
def in_place(folder, *parts):
    def save():
        torch.save(collect(*parts), file_of(folder))
        dist.barrier()

    return save, lambda: put_back(torch.load(file_of(folder)), *parts)


KEPT = {}


@wrong("there is no file in the folder")
def in_memory(folder, *parts):
    def save():
        KEPT["state"] = collect(*parts)  # and the tensors are those that go on being trained

    return save, lambda: put_back(KEPT["state"], *parts)


@wrong("load() restores an older checkpoint")
def keeps_the_first(folder, *parts):
    def save():
        if not os.path.exists(file_of(folder)):
            write(collect(*parts), file_of(folder))
        dist.barrier()

    return save, lambda: put_back(torch.load(file_of(folder)), *parts)


@wrong("save() changes the run that it saves: its random numbers")
def seeds_anew(folder, *parts):
    def save():
        torch.manual_seed(0)
        write(collect(*parts), file_of(folder))
        dist.barrier()

    return save, lambda: put_back(torch.load(file_of(folder)), *parts)


@wrong("the learning rate is 0.2 instead of")
def keeps_the_learning_rate(folder, model, optimizer, schedule, scaler, progress):
    parts = model, optimizer, schedule, scaler, progress
    save, load = without()(folder, *parts)

    def load_and_reset():
        load()
        optimizer.param_groups[0]["lr"] = 0.2

    return save, load_and_reset


@wrong("it should return two functions")
def returns_save(folder, *parts):
    return without()(folder, *parts)[0]


# ---- right

one_file_a_rank = without()
one_file_a_rank.__name__ = "one_file_a_rank"
right(one_file_a_rank)


@right
def with_the_package(folder, model, optimizer, schedule, scaler, progress):
    from ddp_course import checkpoint

    path = os.path.join(folder, "checkpoint.pt")
    parts = {"model": model, "optimizer": optimizer, "amp": scaler, "scheduler": schedule}

    def load():
        state = checkpoint.load(path, **parts)
        progress["epoch"] = state["epoch"]
        progress["batches_done"] = state["batches_done"]

    return lambda: checkpoint.save(path, **parts, **progress), load


@right
def gathered_on_rank_0(folder, model, optimizer, schedule, scaler, progress):
    """Gathers the random states; rank 0 writes all into one file, by way of memory."""
    path = os.path.join(folder, "all.bin")

    def save():
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
        dist.all_gather(states, torch.get_rng_state())
        if dist.get_rank() == 0:
            state = collect(model, optimizer, schedule, scaler, progress) | {"random": states}
            memory = io.BytesIO()
            torch.save(state, memory)
            with open(path + "~", "wb") as file:
                file.write(memory.getvalue())
            os.rename(path + "~", path)
        dist.barrier()

    def load():
        with open(path, "rb") as file:
            state = torch.load(file)
        state["random"] = state["random"][dist.get_rank()]
        put_back(state, model, optimizer, schedule, scaler, progress)

    return save, load


@right
def a_folder_for_each_checkpoint(folder, model, optimizer, schedule, scaler, progress):
    """Never overwrites: a new folder each time, and a note, replaced in the end, of the last."""

    class Checkpoints:
        def save(self):
            name = f"{progress['epoch']}-{progress['batches_done']}"
            place = os.path.join(folder, name)
            os.makedirs(place, exist_ok=True)
            parts = model, optimizer, schedule, scaler, progress
            state = collect(*parts)
            state["random"] = state["random"].tolist()
            with open(os.path.join(place, f"{dist.get_rank()}.pickle"), "wb") as file:
                pickle.dump(state, file)
            dist.barrier()
            if dist.get_rank() == 0:
                with open(os.path.join(folder, "new"), "w") as file:
                    json.dump(name, file)
                os.replace(os.path.join(folder, "new"), os.path.join(folder, "last"))
            dist.barrier()

        def load(self):
            with open(os.path.join(folder, "last")) as file:
                name = json.load(file)
            with open(os.path.join(folder, name, f"{dist.get_rank()}.pickle"), "rb") as file:
                state = pickle.load(file)
            state["random"] = torch.tensor(state["random"], dtype=torch.uint8)
            put_back(state, model, optimizer, schedule, scaler, progress)

    both = Checkpoints()
    return [both.save, both.load]
