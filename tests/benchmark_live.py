"""How much a live view slows training down: with and without it, taking turns in one run.

    python tests/benchmark_live.py [ROUNDS]

In a live kernel, on as many ranks as there are cores, so that drawing takes time from training.
"""

import statistics
import sys

from kernels import Kernel

SETUP = """
import os
from ddp_course import launch, live, train
settings = train.Settings(task="digits", epochs=30, micro_batch=64)
nproc = os.cpu_count()

def seconds(on_record=None):
    run = launch(train.run, settings, nproc=nproc, on_record=on_record)
    return sum(r["seconds"] for r in run.records if r["rank"] == 0 and r["step"] > 20)

def viewed():
    with live.view() as view:
        return seconds(view)

_ = seconds(), viewed()
"""


def main(rounds: int) -> None:
    kernel, ratios = Kernel(), []
    try:
        kernel.run(SETUP, timeout=300)
        for _ in range(rounds):
            told = kernel.run("print('TOOK', seconds(), viewed(), seconds())", timeout=300)
            before, with_view, after = map(float, told.partition("TOOK")[2].split()[:3])
            ratios.append(with_view / ((before + after) / 2))
            print(f"with the view {ratios[-1]:.3f} times as long", flush=True)
    finally:
        kernel.close()
    print(f"median {statistics.median(ratios):.3f} (smallest {min(ratios):.3f}, "
          f"largest {max(ratios):.3f}) of {rounds} rounds")  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 9)
