"""The Slurm batch file: its shell, and the line that it would run, on one node without Slurm."""

import os
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_course

BATCH = Path(ddp_course.__file__).with_name("train.sbatch")
STUBS = {
    "scontrol": '[ "$*" = "show hostnames node[1-2]" ] && printf "localhost\\nnode2\\n"',
    "srun": 'echo "$*" >"$NOTED"\nshift\nexec "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
}
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def free_job() -> int:
    """A job number whose port is free."""
    while True:
        job = random.randrange(20_000)
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", 20_000 + job))
                return job
            except OSError:
                continue


@pytest.fixture
def slurm(tmp_path):
    """Return a function that runs the batch file with stand-ins for Slurm's commands."""
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(*arguments, **env):
        told = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "NOTED": str(tmp_path / "srun.txt"),
            "SLURM_JOB_ID": str(free_job()), "SLURM_JOB_NUM_NODES": "1",
            "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "2", **env,
        }  # fmt: skip
        inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS",)}
        done = subprocess.run(
            ["bash", BATCH, *arguments], env=inherited | told, text=True, capture_output=True,
            timeout=100,
        )  # fmt: skip
        noted = tmp_path / "srun.txt"
        return done, noted.read_text() if noted.exists() else "", told

    return run


def test_the_shell_can_read_it():
    assert subprocess.run(["bash", "-n", BATCH]).returncode == 0


def test_its_options_come_before_its_first_command():
    """Slurm reads #SBATCH lines up to the first command only."""
    lines = BATCH.read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert options and max(options) < first
    assert "#SBATCH --ntasks-per-node=1" in lines  # torchrun starts the ranks


def test_it_trains(slurm, tmp_path):
    file = tmp_path / "run.pt"
    done, srun, told = slurm(
        "--epochs=1", "--micro-batch=96", f"--checkpoint={file}", RANKS_PER_NODE="2"
    )
    assert done.returncode == 0, done.stderr
    assert "step    8/8" in done.stdout and "test accuracy" in done.stdout
    assert done.stdout.count("test accuracy") == 1 and file.exists()
    port = 20_000 + int(told["SLURM_JOB_ID"])
    assert (
        f"--nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-id {told['SLURM_JOB_ID']}"
        in srun
    )
    assert f"--rdzv-endpoint localhost:{port}" in srun  # the first of the job's nodes


def test_a_rank_for_each_gpu_and_a_share_of_the_cores_for_each(slurm, tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "threads $OMP_NUM_THREADS"\n')
    stub = {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_NUM_NODES": "16"}
    done, srun, _ = slurm("--epochs=1", **stub)
    assert "--nnodes 16 --nproc-per-node 4" in srun and done.stdout == "threads 8\n"
    assert srun.rstrip().endswith("-m ddp_course.train --epochs=1")


def test_without_its_nodes_it_stops_before_torchrun(slurm):
    done, srun, _ = slurm(SLURM_JOB_NODELIST="unknown")
    assert done.returncode != 0 and not srun
