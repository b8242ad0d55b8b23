"""Wrong and right answers to 04_bucketed_ddp: what each is told."""

import functools

import torch
import torch.distributed as dist

from ddp_course import ddp

from . import answers

WRONG, RIGHT, wrong, right = answers()


def broadcast(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def filled(model, bucket_bytes, backwards=True):
    parameters = [p for p in model.parameters() if p.requires_grad]
    buckets, room = [], 0
    for p in reversed(parameters) if backwards else parameters:
        if not buckets or p.nbytes > room or p.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(p)
        room -= p.nbytes
    return buckets


def flat(bucket):
    return torch.cat([p.grad.flatten() for p in bucket])


def give_back(bucket, mean):
    for p, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
        p.grad.copy_(part.view_as(p))


def started(bucket):
    message = flat(bucket)
    return message, dist.all_reduce(message, async_op=True)


class Averager:
    """The parts of an answer; each wrong one is this with a part of it spoilt."""

    wait = True

    def __init__(self, model, bucket_bytes):
        self.begin(model)
        self.buckets, self.ready, self.sent = self.fill(model, bucket_bytes), set(), []
        for bucket in self.buckets:
            for p in bucket:
                self.watch(p)

    def begin(self, model):
        broadcast(model)

    def fill(self, model, bucket_bytes):
        return filled(model, bucket_bytes)

    def watch(self, p):
        p.register_post_accumulate_grad_hook(self.came)

    def came(self, p):
        self.ready.add(p)
        self.send()

    def send(self):
        while len(self.sent) < len(self.buckets):
            bucket = self.buckets[len(self.sent)]
            if not self.ready.issuperset(bucket):
                return
            self.sent.append(self.start(bucket))

    def start(self, bucket):
        return started(bucket)

    def finish(self):
        for bucket, (message, work) in zip(self.buckets, self.sent, strict=False):
            if self.wait and work is not None:
                work.wait()
            give_back(bucket, self.mean(message))
        self.clear()

    def mean(self, message):
        return message / dist.get_world_size()

    def clear(self):
        self.ready.clear()
        self.sent.clear()


def spoilt(message):
    """@wrong for a class: its answer is a function of its name."""

    def keep(kind):
        def answer(model, bucket_bytes):
            return kind(model, bucket_bytes).finish

        answer.__name__ = answer.__qualname__ = kind.__name__
        return wrong(message)(answer)

    return keep


@wrong("it should return a function, to call after backward")
def returns_the_model(model, bucket_bytes):
    Averager(model, bucket_bytes)
    return "done"


@spoilt("this rank's own still: broadcast the weights before you train")
class NoBroadcast(Averager):
    def begin(self, model):
        pass


@spoilt("It is the mean over the ranks: copy rank 0's")
class AveragedWeights(Averager):
    def begin(self, model):
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.all_reduce(tensor.detach())
            tensor.data.copy_(tensor / dist.get_world_size())


@spoilt("buffers are broadcast as well")
class NoBuffers(Averager):
    def begin(self, model):
        for p in model.parameters():
            dist.broadcast(p.detach(), src=0)


@spoilt("what never moves must begin equal")
class TrainedOnlyBroadcast(Averager):
    def begin(self, model):
        for tensor in [p for p in model.parameters() if p.requires_grad] + [*model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


@spoilt("the mean: it was not divided by the world size")
class Summed(Averager):
    def mean(self, message):
        return message


@spoilt("it was divided by the world size twice")
class DividedTwice(Averager):
    def mean(self, message):
        return message / dist.get_world_size() ** 2


@spoilt("the hook waits for the other ranks")
class WaitsInTheHook(Averager):
    def start(self, bucket):
        message = flat(bucket)
        return message, dist.all_reduce(message)


@spoilt("it does not wait for what was started")
class NeverWaits(Averager):
    wait = False


@spoilt("the averages were not put into p.grad, or nothing was sent")
class NotGivenBack(Averager):
    def finish(self):
        for message, work in self.sent:
            work.wait()
            message /= dist.get_world_size()
        self.clear()


@spoilt("no rank called a collective")
class TalksToNobody(Averager):
    def start(self, bucket):
        return flat(bucket), None


@spoilt("nothing overlaps")
class SendsInFinish(Averager):
    def came(self, p):
        self.ready.add(p)

    def finish(self):
        self.send()
        super().finish()


@spoilt("they wait for the end of backward")
class SendsAtTheEndOfBackward(Averager):
    def came(self, p):
        self.ready.add(p)
        if len(self.ready) == sum(map(len, self.buckets)):
            self.send()


@spoilt("as it is not *full*")
class LastBucketNeverSent(Averager):
    def send(self):
        if len(self.sent) < len(self.buckets) - 1:
            super().send()


@spoilt("1 of 3 buckets go in finish() only")
class LastBucketInFinish(Averager):
    def send(self, most=1):
        while len(self.sent) < len(self.buckets) - most:
            bucket = self.buckets[len(self.sent)]
            if not self.ready.issuperset(bucket):
                return
            self.sent.append(self.start(bucket))

    def finish(self):
        self.send(most=0)
        super().finish()


@spoilt("one for each parameter: put small ones together")
class OneForEachParameter(Averager):
    def fill(self, model, bucket_bytes):
        return filled(model, 1)


@spoilt("All gradients go in one message")
class OneMessage(Averager):
    def fill(self, model, bucket_bytes):
        return filled(model, 10**9)


@spoilt("They are filled in the order of registration")
class FilledForwards(Averager):
    def fill(self, model, bucket_bytes):
        return filled(model, bucket_bytes, backwards=False)


@spoilt("look whether a parameter fits *before* it is put in")
class LooksAfterwards(Averager):
    def fill(self, model, bucket_bytes):
        buckets = [[]]
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if sum(q.nbytes for q in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(p)
        return buckets


@spoilt("at most, not less than")
class NeverQuiteFull(Averager):
    def fill(self, model, bucket_bytes):
        return filled(model, bucket_bytes - 1)


@spoilt("another type begins a new bucket")
class MixesTypes(Averager):
    def fill(self, model, bucket_bytes):
        buckets, room = [], 0
        for p in reversed([p for p in model.parameters() if p.requires_grad]):
            if not buckets or p.nbytes > room:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets


@spoilt("and no room that is left in it")
class SendsEmptyRoom(Averager):
    def start(self, bucket):
        message = flat(bucket)
        message = torch.cat([message, message.new_zeros(max(0, 50 - len(message)))])
        return message, dist.all_reduce(message, async_op=True)

    def mean(self, message):
        numbers = sum(p.numel() for p in self.buckets[self.sent_back()])
        return message[:numbers] / dist.get_world_size()

    def sent_back(self):
        self.number = getattr(self, "number", -1) + 1
        return self.number % len(self.buckets)


@spoilt("It is the average of the backward before")
class NotReset(Averager):
    def clear(self):
        pass


class Counts(Averager):
    """A full bucket is found by counting its gradients."""

    def fill(self, model, bucket_bytes):
        buckets = filled(model, bucket_bytes)
        self.number = {p: number for number, bucket in enumerate(buckets) for p in bucket}
        self.count = [0] * len(buckets)
        return buckets

    def came(self, p):
        self.count[self.number[p]] += 1
        self.send()

    def full(self, number):
        return self.count[number] >= len(self.buckets[number])

    def send(self):
        while len(self.sent) < len(self.buckets) and self.full(len(self.sent)):
            self.sent.append(self.start(self.buckets[len(self.sent)]))


@spoilt("This is backward 2. It did not happen in the backward before: empty what you keep")
class CountsNotReset(Counts):
    pass


@spoilt("They carry 0 of 93 numbers: something was not sent.\nIt did not happen in the backward")
class CountsGoOn(Counts):
    def full(self, number):
        return self.count[number] == len(self.buckets[number])


@spoilt("the bucket was not emptied")
class AddsUp(Averager):
    def start(self, bucket):
        self.held = getattr(self, "held", {})
        number = len(self.sent)
        message = self.held[number] = self.held.get(number, 0) + flat(bucket)
        message = message.clone()
        return message, dist.all_reduce(message, async_op=True)


@spoilt("takes no hook")
class HooksTheFrozen(Averager):
    def fill(self, model, bucket_bytes):
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
        return filled(model, bucket_bytes)


@spoilt("Does it wait for the gradient of a frozen parameter?")
class WaitsForTheFrozen(Averager):
    def fill(self, model, bucket_bytes):
        buckets, room = [], 0
        for p in reversed(list(model.parameters())):
            if not buckets or p.nbytes > room or p.dtype != buckets[-1][-1].dtype:
                buckets.append([])
                room = bucket_bytes
            buckets[-1].append(p)
            room -= p.nbytes
        return buckets

    def watch(self, p):
        if p.requires_grad:
            super().watch(p)


@spoilt("Send them in one order on all ranks")
class SendsWhatIsFull(Averager):
    def send(self):
        done = [number for number, *_ in self.sent]
        for number, bucket in enumerate(self.buckets):
            if number not in done and self.ready.issuperset(bucket):
                self.sent.append((number, *self.start(bucket)))

    def finish(self):
        for number, message, work in self.sent:
            work.wait()
            give_back(self.buckets[number], self.mean(message))
        self.clear()


@spoilt("it calls all_gather")
class Gathers(Averager):
    def start(self, bucket):
        mine = flat(bucket)
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        return everybody, dist.all_gather(everybody, mine, async_op=True)

    def mean(self, everybody):
        return torch.stack(everybody).mean(0)


@right
def in_one_function(model, bucket_bytes):
    broadcast(model)
    buckets, ready, under_way = filled(model, bucket_bytes), set(), []

    def came(p):
        ready.add(id(p))
        while len(under_way) < len(buckets):
            bucket = buckets[len(under_way)]
            if any(id(p) not in ready for p in bucket):
                break
            message = flat(bucket) / dist.get_world_size()
            under_way.append((dist.all_reduce(message, async_op=True), message))

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(came)

    def finish():
        for bucket, (work, mean) in zip(buckets, under_way, strict=True):
            work.wait()
            give_back(bucket, mean)
        ready.clear()
        under_way.clear()

    return finish


@right
def with_views_and_counters(model, bucket_bytes):
    """Buckets are kept, gradients become views of them; counts say when one is full."""
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    buckets = filled(model, bucket_bytes)
    kept = [torch.zeros(sum(p.numel() for p in b), dtype=b[0].dtype) for b in buckets]
    views = {}
    for bucket, whole in zip(buckets, kept, strict=True):
        at = 0
        for p in bucket:
            views[p] = whole[at : at + p.numel()].view(p.shape)
            at += p.numel()
    missing, works = [len(b) for b in buckets], []

    def came(p, number):
        views[p].copy_(p.grad)
        missing[number] -= 1
        while len(works) < len(buckets) and missing[len(works)] == 0:
            works.append(dist.all_reduce(kept[len(works)], async_op=True))

    for number, bucket in enumerate(buckets):
        for p in bucket:
            p.register_post_accumulate_grad_hook(functools.partial(came, number=number))

    def finish():
        for work in works:
            work.wait()
        works.clear()
        for number, bucket in enumerate(buckets):
            missing[number] = len(bucket)
            kept[number].div_(dist.get_world_size())
            for p in bucket:
                p.grad = views[p].clone()

    return finish


@right
def with_futures(model, bucket_bytes):
    """Each all-reduce's future divides and copies back; finish waits for the futures."""
    broadcast(model)
    buckets = filled(model, bucket_bytes)
    ready, futures = set(), []

    def started(bucket):
        def arrived(done):
            give_back(bucket, done.value()[0] / dist.get_world_size())

        return dist.all_reduce(flat(bucket), async_op=True).get_future().then(arrived)

    def came(p):
        ready.add(p)
        while len(futures) < len(buckets) and ready.issuperset(buckets[len(futures)]):
            futures.append(started(buckets[len(futures)]))

    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.register_post_accumulate_grad_hook(came)

    def finish():
        torch.futures.wait_all(futures)
        futures.clear()
        ready.clear()

    return finish


@right
def with_tensor_hooks(model, bucket_bytes):
    """Hooks that are given the gradient before it is in p.grad."""
    broadcast(model)
    buckets, came, under_way = filled(model, bucket_bytes), {}, []

    def hook(p, gradient):
        came[p] = gradient.detach()
        while len(under_way) < len(buckets) and all(q in came for q in buckets[len(under_way)]):
            message = torch.cat([came[q].reshape(-1) for q in buckets[len(under_way)]])
            under_way.append((message, dist.all_reduce(message, dist.ReduceOp.AVG, async_op=True)))

    for bucket in buckets:
        for p in bucket:
            p.register_hook(functools.partial(hook, p))

    def finish():
        for bucket, (message, work) in zip(buckets, under_way, strict=True):
            work.wait()
            give_back(bucket, message)
        came.clear()
        under_way.clear()

    return finish


@right
def the_packages_own(model, bucket_bytes):
    return ddp.BucketedDDP(model, bucket_cap_mb=bucket_bytes / ddp.MB).finish
