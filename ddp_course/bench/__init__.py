"""This course measured side by side with what would be used instead: `ddp-course bench`.

cases         what is compared, and when a goal is met
table, chart  how it is shown
kernel        a live Jupyter kernel to measure in
launchers     the same work by each launcher
TARGETS       the targets, one module each: `measure(rounds, say)` returns its cases
"""

TARGETS = {
    "launch": "from a cell to the sum of an all-reduce, by each launcher",
    "memory": "what ranks and the notebook hold, by launcher",
    "faults": "from a rank's failure to the message, and what is left",
    "train": "samples per second on two ranks, by hand and by each wrapper",
    "ddp": "DistributedDataParallel made by hand in lesson 04, and torch's",
    "ring": "all-reduce along a ring by hand, gloo's, and copying memory",
    "live": "training with and without the live view, every core busy",
    "growth": "more ranks, more records, more submissions",
    "grade": "one right submission, and one that hangs",
    "lessons": "every lesson from top to bottom",
}
