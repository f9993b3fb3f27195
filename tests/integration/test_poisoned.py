"""A job whose state leads to a NaN after every restore: it ends with a verdict, and goes on from before the poison."""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ft_plugins.errors import EXIT_REFUSED
from ft_plugins.events import read
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.serve.leftovers import sweep

POISONED, LAST = 6, 14  # the iteration that poisons the state; the last one
BOUND = 400.0  # seconds for a run; its waits are shorter
SCRIPT = f"""
import pathlib, sys, time
import torch, ft_plugins

torch.manual_seed(1)
net = torch.nn.Linear(4, 2)
net.register_buffer("poison", torch.zeros(()))
optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
cured, first = "--cured" in sys.argv, None
for step in ft_plugins.attach(ft_plugins.TorchHost(net, optimizer)).iterations({LAST}):
    first = first or step
    deadline = time.monotonic() + 120
    while step == 5 and not any(pathlib.Path("ck").glob("*/v*-*/manifest.json")):
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    if step == 10 and "--bad-record" in sys.argv:
        raise ValueError("record 10 cannot be read")
    loss = net(torch.full((3, 4), float(step))).square().mean()
    if net.poison and step >= first + 2:  # each life commits two more versions
        loss = loss * float("nan")
    if not torch.isfinite(loss):
        raise RuntimeError(f"loss is NaN at iteration {{step}}")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == {POISONED} and not cured:
        net.poison.fill_(1)
print("weights", net.weight.double().sum().item().hex(), flush=True)
"""


@dataclass(frozen=True)
class Job:
    folder: Path
    name: str

    def run(self, *words, own=()):
        """Exit status and output of `ft-run`."""
        (self.folder / "run").mkdir(mode=0o700, exist_ok=True)
        (self.folder / "train.py").write_text(SCRIPT)
        storage = ("--reft-checkpoint-dir", "ck", "--reft-checkpoint-interval", "2", "--reft-checkpoint-keep", "20")
        ours = ("--reft", *storage, "--ftp-job", self.name, "--ftp-preload", "off", "--ftp-cpu", *words)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(self.folder / "run")}
        out = self.folder / "out"  # no pipe: an SMP that stays would have it open
        with out.open("w") as output:
            done = subprocess.run(
                [sys.executable, "-m", "ft_plugins.launcher.command", *ours, "train.py", *own], cwd=self.folder,
                env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=BOUND, check=False,
            )  # fmt: skip
        return done.returncode, out.read_text()

    def events(self, name):
        [path] = self.folder.glob(f"run/ft_plugins/{self.name}/*/events.jsonl")
        return [event for event in read(path) if event.name == name]


@pytest.fixture
def job(own_environment):
    folder = Path(tempfile.mkdtemp(dir=own_environment))
    yield Job(folder, f"poison-{os.getpid()}-{folder.name}")
    sweep(folder / "run" / "ft_plugins", 0)


def weights(output):
    found = re.findall(r"weights (\S+)", output)
    assert len(found) == 1, output[-3000:]
    return str(found[0])


@pytest.mark.timeout(1500)
def test_a_poisoned_job_ends_with_a_verdict_and_goes_on_from_before_it_as_a_clean_one(job):
    status, output = job.run()
    assert status == EXIT_REFUSED, output[-3000:]
    [verdict] = job.events("failure.recurred")
    assert verdict.fields["resumed"] == [POISONED, POISONED + 2, POISONED + 4]
    assert verdict.fields["completed"] == [POISONED + 2, POISONED + 4, POISONED + 6]
    assert [event.fields["status"] for event in job.events("job.ended")] == ["recurring"]
    named = re.search(rf"with --ftp-resume (before:{POISONED}), which restores iteration (\d) from storage", output)
    assert named and "RuntimeError: loss is NaN at iteration 13" in output, output[-3000:]
    assert len(job.events("worker.failed")) == 4, "not restarted after the verdict"

    status, output = job.run("--ftp-resume", named[1], own=("--cured",))
    assert status == 0, output[-3000:]
    restored = job.events("state.restored")[-1].fields
    assert (restored["tier"], restored["iteration"]) == ("storage", int(named[2])) and int(named[2]) < POISONED
    assert any(f"-{POISONED}.void" in event.fields["reason"] for event in job.events("checkpoint.voided"))
    after = weights(output)

    clean = Job(job.folder.parent / "c", f"{job.name}-c")
    clean.folder.mkdir(mode=0o700)
    status, output = clean.run(own=("--cured",))
    assert status == 0 and weights(output) == after, "bit for bit"


@pytest.mark.timeout(1500)
def test_an_error_at_one_iteration_of_each_start_ends_with_the_same_verdict_without_newer_versions(job):
    status, output = job.run(own=("--cured", "--bad-record"))
    [verdict] = job.events("failure.recurred")
    assert status == EXIT_REFUSED, output[-3000:]
    assert (verdict.fields["resumed"], verdict.fields["completed"]) == ([9, 9, 9], [9, 9, 9])
    assert re.search(r"record 10 cannot be read.*--ftp-resume before:9, which restores iteration 8 from memory", output)
    assert [event.fields["status"] for event in job.events("job.ended")] == ["recurring"]
    with Client(next(job.folder.glob(f"run/ft_plugins/{job.name}/*"))) as client:  # what it keeps for the next start
        client.end()
