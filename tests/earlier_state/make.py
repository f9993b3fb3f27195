"""Make the archives again: run each job unfailed, then store a checkpoint, end it, and take its memory.

    python tests/earlier_state/make.py [torch megatron deepspeed]

Only for a new framework or another job: an archive made again is no longer of an earlier version. See `harness`'s
`earlier_state` for what is in one.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from ft_plugins.snapshot.segment import header, paths  # noqa: E402
from harness import deepspeed_runs, earlier_state, megatron_runs  # noqa: E402
from harness.earlier_state import RANKS, STORED, EarlierJob  # noqa: E402
from harness.forkserver import ForkServer, JobSpec  # noqa: E402
from harness.job_control import lose_memory, run_to_end, write_checkpoints  # noqa: E402

PRELOAD = {
    "torch": ("ft_plugins.launcher.node_launch",),
    "megatron": megatron_runs.PRELOAD,
    "deepspeed": deepspeed_runs.PRELOAD,
}


def make(framework, work):
    """Make the archive of a framework. Returns its path."""
    content = work / "content"
    (content / "segments").mkdir(parents=True)
    golden, stored = EarlierJob(framework, work / "golden"), EarlierJob(framework, work / "stored")
    name = f"earlier-{framework}"
    with ForkServer(PRELOAD[framework]) as server:
        run_to_end(server, JobSpec(name=f"{name}-golden", **golden.fields(None)))
        spec = JobSpec(name=name, **stored.fields(work / "checkpoints"), runtime=str(work))
        write_checkpoints(server, spec, STORED)
        for rank in range(RANKS):
            shutil.copy(paths.path_of(name, spec.node, rank), content / "segments" / f"r{rank}")
        lose_memory(spec)
    shutil.copytree(work / "checkpoints" / name, content / "checkpoint")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    layout = header.MAGIC.to_bytes(8, "little").decode()
    earlier_state.describe(earlier_state.about_here(commit, layout), content, golden.end())
    return earlier_state.pack(framework, content)


def main():
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
    for framework in sys.argv[1:] or earlier_state.FRAMEWORKS:
        with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as work:
            path = make(framework, Path(work))
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
