"""Output of a rank, wherever it is cut into pieces."""

import pytest

from ddp_course.output import Output

REPORT = b"""\
Thread 0x00007f2b (most recent call first):
  <no Python frame>

Current thread 0x00007f2a (most recent call first):
  Garbage-collecting
  File "/tmp/ipykernel_1/2.py", line 4 in worker
  File "/usr/lib/rank.py", line 171 in _run
"""
FIRST_LINE = REPORT.index(b"\n") + 1


@pytest.mark.parametrize("end", range(FIRST_LINE, len(REPORT) + 1))
def test_a_report_that_was_cut_short_is_not_shown(capsys, end):
    output = Output(0)
    output.feed(REPORT[:end])
    output.end()
    assert capsys.readouterr().out == ""


def test_what_a_student_prints_without_a_newline_is_shown(capsys):
    output = Output(1)
    output.feed(b"loss 0.5\n  F")
    output.end()
    assert capsys.readouterr().out == "[rank 1] loss 0.5\n[rank 1]   F\n"


@pytest.mark.parametrize("cut", range(1, len("größer\n".encode())))
def test_pieces_may_be_of_any_size(capsys, cut):
    data = "größer\n".encode()
    output = Output(0)
    output.feed(data[:cut])
    output.feed(data[cut:])
    assert capsys.readouterr().out == "[rank 0] größer\n"
