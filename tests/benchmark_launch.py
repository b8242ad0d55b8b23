"""How fast ranks start: `launch` against torch.multiprocessing.spawn, taking turns in one run.

    python tests/benchmark_launch.py [ROUNDS]

From the call to the sum of an all_reduce on two ranks. The first launch of a fresh kernel, in the
cell that imports everything, is compared with one `import torch` of a fresh process.
"""

import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from kernels import Kernel

from ddp_course import launch

FIRST = """
import time
import ddp_course, torch
began = time.perf_counter()
ddp_course.launch(ddp_course.this_rank)
print(time.perf_counter() - began)
"""
IMPORT = (
    "import time; began = time.perf_counter(); import torch; print(time.perf_counter() - began)"
)


def reduce_on_launched_rank():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def reduce_on_spawned_rank(rank, port, queue):
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    queue.put(reduce_on_launched_rank())
    dist.destroy_process_group()


def spawn() -> list[float]:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(reduce_on_spawned_rank, (free_port(), queue), nprocs=2)
    return [queue.get(), queue.get()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def seconds(work) -> float:
    began = time.perf_counter()
    assert work() == [2.0, 2.0]
    return time.perf_counter() - began


def in_a_fresh_process(code: str) -> float:
    return float(subprocess.check_output([sys.executable, "-c", code], text=True))


def in_a_fresh_kernel(code: str) -> float:
    kernel = Kernel()
    try:
        return float(kernel.run(code))
    finally:
        kernel.close()


def say(name: str, times: list[float]) -> float:
    middle = statistics.median(times)
    print(f"{name:38} median {middle:.3f} s, {min(times):.3f} to {max(times):.3f}")
    return middle


def main(rounds: int) -> None:
    launched, spawned, first, imported = [], [], [], []
    for _ in range(rounds):
        first.append(in_a_fresh_kernel(FIRST))
        imported.append(in_a_fresh_process(IMPORT))
    launch(dist.get_rank)
    time.sleep(8)  # the server imports what the first DDP of a rank needs
    for _ in range(rounds):
        launched.append(seconds(lambda: launch(reduce_on_launched_rank).values))
        spawned.append(seconds(spawn))
    ratio = say("torch.multiprocessing.spawn", spawned) / say("launch, later", launched)
    print(f"later launches are {ratio:.0f} times as fast as spawn")
    ratio = say("launch, first in its kernel", first) / say("import torch", imported)
    print(f"a first launch takes {ratio:.2f} of one import of torch")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
