"""Wrong and right answers to 14_capstone: what each is told."""

import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_course import checkpoint, data
from ddp_course.accumulation import accumulate, windows
from ddp_course.amp import MixedPrecision
from ddp_course.train import evaluate, warmup_then_cosine
from ddp_course.train import train as train_by_the_course

from . import answers

WRONG, RIGHT, wrong, right = answers()


class Script:
    """The right training, in parts to change."""

    def __call__(self, model, train_set, test_set, plan):
        self.plan, self.train_set, self.bare = plan, train_set, model
        self.model = self.wrap(model)
        self.sampler = self.make_sampler(train_set)
        loader = DataLoader(train_set, plan.micro_batch, sampler=self.sampler)
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), self.rate())
        per_epoch = self.windows_of(list(range(len(loader))))
        steps = plan.epochs * len(per_epoch)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor(steps))
        fp16 = plan.precision == "fp16"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=plan.init_scale, enabled=fp16)
        self.parts = {"model": self.bare, "optimizer": self.optimizer}
        self.parts |= {"schedule": self.schedule, "scaler": self.scaler}
        first = self.load() if plan.checkpoint and os.path.exists(plan.checkpoint) else 0
        losses, self.tokens, begun = [], 0, time.perf_counter()
        for epoch in range(first, plan.epochs):
            self.new_epoch(epoch)
            for window in self.windows_of(list(loader)):
                losses.append(self.told(self.backward(window)))
                self.step()
                self.tokens += sum(y.numel() for _, y in window)
            self.end_of_epoch()
            if plan.checkpoint:
                self.save(epoch + 1)
        seconds = torch.tensor(time.perf_counter() - begun)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return {
            "weights": self.state(),
            "losses": losses,
            "test_loss": self.test(test_set),
            "tokens_per_s": self.tokens_of_all() / seconds.item(),
        }

    def wrap(self, model):
        return DistributedDataParallel(model)

    def make_sampler(self, dataset):
        return DistributedSampler(dataset, seed=self.plan.seed)

    def rate(self):
        return self.plan.learning_rate

    def factor(self, steps):
        warmup = self.plan.warmup_steps

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

        return factor

    def windows_of(self, batches):
        size = self.plan.accumulation_steps
        return [batches[start : start + size] for start in range(0, len(batches), size)]

    def new_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def end_of_epoch(self):
        pass

    def share(self, window, y):
        return y.numel() / sum(y.numel() for _, y in window)

    def synchronise(self, number, window):
        self.model.require_backward_grad_sync = number == len(window)

    def backward(self, window):
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.plan.precision)
        total = 0.0
        for number, (x, y) in enumerate(window, 1):
            self.synchronise(number, window)
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
                loss = loss * self.share(window, y)
            self.scaler.scale(loss).backward()
            self.after_micro_batch()
            total += loss.item()
        return total

    def after_micro_batch(self):
        pass

    def told(self, loss):
        loss = torch.tensor(loss)
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    def clip(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.plan.max_norm)

    def step(self):
        self.clip()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.clear()
        self.advance(self.scaler.get_scale() >= scale)

    def clear(self):
        self.optimizer.zero_grad()

    def advance(self, taken):
        if taken:
            self.schedule.step()

    def save(self, epoch):
        if dist.get_rank() == 0:
            state = {name: part.state_dict() for name, part in self.saved().items()}
            torch.save(state | {"epoch": epoch}, self.plan.checkpoint)
        dist.barrier()

    def saved(self):
        return self.parts

    def load(self):
        state = torch.load(self.plan.checkpoint)
        for name, part in self.saved().items():
            part.load_state_dict(state[name])
        return state["epoch"]

    def state(self):
        return self.bare.state_dict()

    def mine(self, test_set):
        return range(dist.get_rank(), len(test_set), dist.get_world_size())

    def test(self, test_set):
        sums = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for x, y in DataLoader(test_set, self.plan.micro_batch, sampler=self.mine(test_set)):
                loss = F.cross_entropy(self.bare(x).flatten(0, 1), y.flatten(), reduction="sum")
                sums += torch.tensor([loss.item(), y.numel()])
        return self.mean(sums)

    def mean(self, sums):
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def tokens_of_all(self):
        return self.tokens * dist.get_world_size()


def changed(name, **parts):
    """Return the script as a function of this name, with some of its parts replaced."""
    script = type(name, (Script,), parts)

    def capstone(model, train_set, test_set, plan):
        return script()(model, train_set, test_set, plan)

    capstone.__name__ = capstone.__qualname__ = name
    return capstone


# ---- right


right(changed("in_parts"))


@right
def with_the_course(model, train_set, test_set, plan):
    model = DistributedDataParallel(model)
    loader = data.shard(train_set, plan.micro_batch, seed=plan.seed)
    optimizer = torch.optim.AdamW(model.parameters(), plan.learning_rate)
    amp = MixedPrecision(plan.precision, max_norm=plan.max_norm, init_scale=plan.init_scale)
    steps = plan.epochs * math.ceil(len(loader) / plan.accumulation_steps)
    schedule = warmup_then_cosine(optimizer, plan.warmup_steps, steps)
    parts = {"model": model, "optimizer": optimizer, "amp": amp, "scheduler": schedule}
    first = 0
    if plan.checkpoint and os.path.exists(plan.checkpoint):
        first = checkpoint.load(plan.checkpoint, **parts)["epoch"]
    losses, tokens, begun = [], 0, time.perf_counter()
    for epoch in range(first, plan.epochs):
        loader.sampler.set_epoch(epoch)
        for window in windows(loader, plan.accumulation_steps):
            divisor, local = window.divisor(), 0.0
            for x, y in accumulate(model, window):
                with amp.autocast():
                    logits = model(x).flatten(0, 1)
                    loss = F.cross_entropy(logits, y.flatten(), reduction="sum") / divisor
                amp.backward(loss)
                local += loss.item()
            if not amp.step(optimizer).skipped:
                schedule.step()
            mean = torch.tensor(local)
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            losses.append(mean.item())
            tokens += divisor * dist.get_world_size()
        if plan.checkpoint:
            checkpoint.save(plan.checkpoint, **parts, epoch=epoch + 1)
    rate = torch.tensor(tokens / (time.perf_counter() - begun))
    dist.all_reduce(rate, op=dist.ReduceOp.MIN)
    plain = MixedPrecision()
    test_loss, _ = evaluate(model, data.exact_shard(test_set, plan.micro_batch), plain)
    told = {"losses": losses, "test_loss": test_loss, "tokens_per_s": rate.item()}
    return told | {"weights": model.module.state_dict()}


@right
def with_the_loop_of_the_course(model, train_set, test_set, plan):
    ddp_model = DistributedDataParallel(model)
    loader = data.shard(train_set, plan.micro_batch, seed=plan.seed)
    optimizer = torch.optim.AdamW(ddp_model.parameters(), plan.learning_rate)
    amp = MixedPrecision(plan.precision, max_norm=plan.max_norm, init_scale=plan.init_scale)
    window = plan.accumulation_steps
    steps = plan.epochs * math.ceil(len(loader) / window)
    schedule = warmup_then_cosine(optimizer, plan.warmup_steps, steps)
    parts = {"model": ddp_model, "optimizer": optimizer, "amp": amp, "scheduler": schedule}
    done = (0, 0, 0)
    if plan.checkpoint and os.path.exists(plan.checkpoint):
        state = checkpoint.load(plan.checkpoint, **parts)
        done = (state["epoch"], state["step"], 0)
    records = []
    for record in train_by_the_course(
        ddp_model, loader, optimizer, amp, schedule,
        epochs=plan.epochs, accumulation_steps=window, done=done,
    ):  # fmt: skip
        records.append(record)
        if plan.checkpoint and record["batches_done"] == len(loader):
            epoch, step = record["epoch"] + 1, record["step"] + 1
            checkpoint.save(plan.checkpoint, **parts, epoch=epoch, step=step)
    seconds = torch.tensor(sum(record["seconds"] for record in records))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    tokens = sum(record["samples"] for record in records)
    test_loss, _ = evaluate(ddp_model, data.exact_shard(test_set, 2), MixedPrecision())
    return {
        "weights": model.state_dict(),
        "losses": [record["loss"] for record in records],
        "test_loss": test_loss,
        "tokens_per_s": tokens / seconds.item(),
    }


@right
class WithoutDDP(Script):
    """Gradients averaged by hand, as one flat message."""

    def __new__(cls, model, train_set, test_set, plan):
        return Script.__call__(object.__new__(cls), model, train_set, test_set, plan)

    def wrap(self, model):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        return model

    def synchronise(self, number, window):
        pass

    def clip(self):
        gradients = [p.grad for p in self.bare.parameters()]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        parts = flat.split([g.numel() for g in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        super().clip()


# ---- wrong: the weights


def is_wrong(name, message, **parts):
    wrong(message)(changed(name, **parts))


is_wrong(
    "adds_means", "were added up: weigh each", share=lambda self, window, y: 1.0,
)  # fmt: skip
is_wrong(
    "by_accumulation_steps", "divided by accumulation_steps",
    share=lambda self, window, y: 1 / self.plan.accumulation_steps,
)  # fmt: skip
is_wrong(
    "by_the_number_of_micro_batches", "divided by the number of micro-batches",
    share=lambda self, window, y: 1 / len(window),
)  # fmt: skip
is_wrong(
    "drops_the_last_window", "incomplete window was dropped",
    windows_of=lambda self, batches: [
        window for window in Script.windows_of(self, batches)
        if len(window) == self.plan.accumulation_steps
    ],
)  # fmt: skip
is_wrong(
    "does_not_clip", "were not clipped",
    clip=lambda self: self.scaler.unscale_(self.optimizer),
)  # fmt: skip


def _clip_now(self):
    torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.plan.max_norm)


is_wrong("no_schedule", "stayed as it was", advance=lambda self, taken: None)
is_wrong(
    "schedule_by_epoch", "stepped once an epoch",
    advance=lambda self, taken: None, end_of_epoch=lambda self: self.schedule.step(),
    factor=lambda self, steps: Script.factor(self, self.plan.epochs),
)  # fmt: skip
is_wrong("forgets_set_epoch", "the order of epoch 0", new_epoch=lambda self, epoch: None)
is_wrong("keeps_gradients", "still in .grad", clear=lambda self: None)
is_wrong(
    "alone", "from weights of its own: is the model wrapped",
    wrap=lambda self, model: model, synchronise=lambda self, number, window: None,
)  # fmt: skip
is_wrong(
    "everything_everywhere", "Every rank took all",
    make_sampler=lambda self, dataset: DistributedSampler(dataset, 1, 0, seed=self.plan.seed),
)  # fmt: skip
is_wrong(
    "scales_the_rate", "multiplied by the ranks",
    rate=lambda self: self.plan.learning_rate * dist.get_world_size(),
)  # fmt: skip
is_wrong(
    "names_of_the_wrapper", "They are the wrapper's", state=lambda self: self.model.state_dict(),
)  # fmt: skip


@wrong("Each rank began with weights of its own")
class AveragesOnly(WithoutDDP):
    def wrap(self, model):
        return model


@wrong("were clipped before they were averaged")
class ClipsItsOwn(WithoutDDP):
    def clip(self):
        _clip_now(self)
        max_norm = self.plan.max_norm
        object.__setattr__(self.plan, "max_norm", 1e9)
        super().clip()
        object.__setattr__(self.plan, "max_norm", max_norm)


# ---- wrong: what is told, what is sent, what is kept


is_wrong("tells_its_own_loss", "this rank's own loss", told=lambda self, loss: loss)
is_wrong(
    "adds_the_ranks_losses", "The ranks' losses were added up",
    told=lambda self, loss: Script.told(self, loss) * dist.get_world_size(),
)  # fmt: skip
is_wrong(
    "one_loss_an_epoch_short", "one for each step",
    told=lambda self, loss: Script.told(self, loss),
    __call__=lambda self, *a: (r := Script.__call__(self, *a)) | {"losses": r["losses"][1:]},
)  # fmt: skip
is_wrong(
    "synchronises_each_micro_batch", "belong inside no_sync()",
    synchronise=lambda self, number, window: None,
)  # fmt: skip
is_wrong(
    "pads_the_test_set", "were counted twice",
    mine=lambda self, test_set: DistributedSampler(test_set, shuffle=False),
)  # fmt: skip
is_wrong(
    "tests_its_part", "this rank's part of the test set alone",
    mean=lambda self, sums: (sums[0] / sums[1]).item(),
)  # fmt: skip


def _mean_of_means(self, sums):
    mean = sums[0] / sums[1]
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


is_wrong("mean_of_the_ranks_means", "the mean of the ranks' means", mean=_mean_of_means)
is_wrong(
    "schedule_moves_in_skipped_steps", "in steps that were skipped",
    advance=lambda self, taken: self.schedule.step(),
)  # fmt: skip


def _clip_scaled(self):
    torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.plan.max_norm)


is_wrong("clips_scaled_gradients", "still scaled", clip=_clip_scaled)


def _step_by_hand(self):
    self.clip()
    self.optimizer.step()
    self.scaler.update()
    self.clear()
    self.schedule.step()


is_wrong("steps_without_the_scaler", "inf or nan in the weights", step=_step_by_hand)
is_wrong("never_saves", "no file at plan.checkpoint", save=lambda self, epoch: None)
is_wrong(
    "never_loads", "the epochs that were done are done", load=lambda self: 0,
)  # fmt: skip
is_wrong(
    "saves_weights_only", "Started again, the run should end where",
    saved=lambda self: {"model": self.bare},
)  # fmt: skip
is_wrong(
    "counts_its_own_tokens", "one rank's tokens", tokens_of_all=lambda self: self.tokens,
)  # fmt: skip
is_wrong(
    "counts_sequences", "They are sequences",
    tokens_of_all=lambda self: Script.tokens_of_all(self) / 8,
)  # fmt: skip


@wrong("and should return a dict")
def returns_nothing(model, train_set, test_set, plan):
    Script()(model, train_set, test_set, plan)


@wrong("lacks tokens_per_s")
def forgets_the_throughput(model, train_set, test_set, plan):
    told = Script()(model, train_set, test_set, plan)
    del told["tokens_per_s"]
    return told
