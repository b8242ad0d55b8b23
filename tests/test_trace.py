"""Spans: what is recorded on real ranks, clocks, overlap as a number, profiler files."""

import functools
import json
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_course import launch, trace
from ddp_course.ddp import BucketedDDP
from ddp_course.models import MLP, parameters_of
from ddp_course.network import SlowLink

on_cpu = functools.partial(launch, backend="gloo", timeout=60)

NAMES = ["forward", "backward", "optimizer step"]


def steps(wrap, link, count=3):
    """Spans of `count` steps after a warm-up, and the model's bytes."""
    inner = MLP(width=32)
    if wrap == "torch":
        model = DistributedDataParallel(inner, bucket_cap_mb=0.004)
        model.register_comm_hook(None, trace.recorded(link or allreduce_hook))
    else:
        hook = trace.recorded(link or allreduce_hook)
        model = BucketedDDP(inner, bucket_cap_mb=0.01, hook=hook)
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    x, y = torch.randn(8, 64), torch.arange(8)
    for step in range(2 + count):
        if step == 2:
            dist.barrier()
            trace.clear()
        with trace.span("forward"):
            loss = F.cross_entropy(model(x), y)
        with trace.span("backward"):
            loss.backward()
            if wrap != "torch":
                model.finish()
        with trace.span("optimizer step"):
            optimizer.step()
            optimizer.zero_grad()
    return trace.spans(), 4 * parameters_of(inner)


@pytest.mark.parametrize("link", [None, SlowLink(1e6)], ids=["plain", "slow link"])
@pytest.mark.parametrize("wrap", ["torch", "by hand"])
def test_spans_of_each_rank(wrap, link):
    for rank, (spans, nbytes) in enumerate(on_cpu(steps, wrap, link).values):
        assert all(span["rank"] == rank for span in spans)
        assert all(span["start"] <= span["end"] for span in spans)
        assert spans == sorted(spans, key=lambda span: span["start"])
        computed = [span for span in spans if span["name"] in NAMES]
        assert [span["name"] for span in computed] == 3 * NAMES
        for before, after in zip(computed, computed[1:], strict=False):
            assert before["end"] <= after["start"]
        sent = [span for span in spans if span["name"] == "all-reduce"]
        assert sum(span["bytes"] for span in sent) == 3 * nbytes
        assert len({span["bucket"] for span in sent}) == len(sent) / 3 > 1
        for before, after in zip(sent, sent[1:], strict=False):
            assert before["end"] <= after["start"]
        if link:
            assert trace.seconds(spans, "all-reduce") >= 3 * nbytes / 1e6
            # All is on the wire for longer than it computes: backward ends, and waits.
            assert trace.seconds(spans, "waiting") > 0
            assert 0 <= trace.overlap(spans) < 1


def test_a_backward_ends_with_its_last_gradient_and_then_waits():
    for spans, _ in on_cpu(steps, "torch", SlowLink(1e6)).values:
        waits = [span for span in spans if span["name"] == "waiting"]
        backwards = [span for span in spans if span["name"] == "backward"]
        assert len(waits) == len(backwards) == 3
        for wait, backward in zip(waits, backwards, strict=True):
            assert wait["start"] == backward["end"]
            began = [s for s in spans if s["name"] == "all-reduce" and s["end"] > wait["start"]]
            assert min(s["end"] for s in began) <= wait["end"]
        last = max(span["end"] for span in spans if span["name"] == "all-reduce")
        assert last <= waits[-1]["end"]


def one(name, start, end, rank=0):
    return {"rank": rank, "name": name, "start": start, "end": end}


def test_overlap_is_the_share_of_communication_that_runs_under_compute():
    spans = [one("forward", 0, 2), one("backward", 2, 6), one("waiting", 6, 9)]
    assert trace.overlap([*spans, one("all-reduce", 3, 5)]) == 1
    assert trace.overlap([*spans, one("all-reduce", 7, 9)]) == 0
    assert trace.overlap([*spans, one("all-reduce", 4, 9)]) == pytest.approx(2 / 5)
    # two at once count once, and touching spans are no gap
    both = [*spans, one("all-reduce", 1, 3), one("all-reduce", 2, 4), one("all-reduce", 8, 9)]
    assert trace.overlap(both) == pytest.approx(3 / 4)
    assert trace.seconds(both, "all-reduce") == pytest.approx(4)
    assert trace.seconds(both, "forward", "backward") == pytest.approx(6)


def test_overlap_pairs_a_rank_with_itself():
    spans = [one("backward", 0, 4), one("all-reduce", 4, 6)]
    others = [one("backward", 4, 8, 1), one("all-reduce", 6, 12, 1)]
    assert trace.overlap(spans + others) == pytest.approx(2 / 8)
    assert trace.hidden_parts(others) == [(6, 8)]


def test_overlap_without_communication_says_what_to_do():
    with pytest.raises(ValueError, match=r"no all-reduce was recorded: register_comm_hook"):
        trace.overlap([one("forward", 0, 1)])


def offset_of(shift):
    """The measured offset, on a machine whose clock on rank k is k * shift seconds ahead."""
    real, ahead = time.perf_counter, shift * dist.get_rank()
    time.perf_counter = lambda: real() + ahead
    try:
        trace.clear()
        with trace.span("forward"):
            now = real()
        return trace.clock_offset(), trace.spans()[0]["end"] - now
    finally:
        time.perf_counter = real


def test_the_offset_of_clocks_is_measured_and_removed():
    for rank, ((offset, uncertainty), late) in enumerate(on_cpu(offset_of, 100.0, nproc=3).values):
        assert abs(offset + 100 * rank) <= uncertainty < 10
        assert abs(late) < 10  # and not 100: on rank 0's clock


def test_one_clock_is_left_as_it_is():
    for (offset, uncertainty), late in on_cpu(offset_of, 0.0).values:
        assert abs(offset) <= uncertainty
        assert late >= 0  # `now` was read inside the span, so it ends after it on a true clock


def test_one_process_has_no_offset():
    assert trace.clock_offset() == (0, 0)


def profiled(folder):
    model = DistributedDataParallel(MLP(width=16))
    with trace.profile(folder):
        F.cross_entropy(model(torch.randn(4, 64)), torch.arange(4)).backward()


def test_profiles_are_saved_for_each_rank_and_one_says_how_to_open_them(tmp_path):
    run = on_cpu(profiled, tmp_path / "traces")
    for rank in range(2):
        content = json.loads((tmp_path / "traces" / f"rank{rank}.json").read_text())
        names = {event.get("name", "") for event in content["traceEvents"]}
        assert any("aten::addmm" in name for name in names)
        assert any(re.search("all_?reduce", name) for name in names)
    said = [line for _, line in run.output if "perfetto" in line]
    assert len(said) == 1 and "rank0.json" in said[0] and "https://ui.perfetto.dev" in said[0]
