"""The tests of both forks that train a DeepSpeed engine: killed, and with a lost node, they end as if unfailed.

A module of tests imports all of this, and has FORK, VARIABLE, which names a checkout, and CASES. They run where that is
set; tests/matrix.sh --clients runs them for each checkout in a folder. Witness: all that a fork saves at the end of
each run, entry by entry.
"""

import time
from pathlib import Path

import pytest

from ft_plugins.rehearse.driver import DrivenJob, DrivePhase
from ft_plugins.rehearse.rehearsal import RUN
from harness.deepspeed_forks import SCRIPTS, ForkCase, applicable, checkout_of, comparison, killed, require_exact, run
from harness.deepspeed_runs import computes_in_fp16
from harness.megatron_lm import RUN_SECONDS, SETTINGS, write_corpus
from harness.rehearsed import rehearsed as rehearse

NODES = (
    ForkCase(
        *("parity", 4, 2, 1, 1),
        iterations=14,
        protected=("--reft", "--reft-interval", "1", "--reft-redundancy", "raim5"),
    ),
    ForkCase("bubbles", 4, 1, 2, 1, iterations=150, protected=("--baft",)),
)
REHEARSED = ForkCase("rehearsal", 2, 1, 1, 1, iterations=12)
LOST_FROM = 4  # the iteration that must be committed before the node is lost


def pytest_generate_tests(metafunc):
    module = metafunc.module
    for name, cases in (("case", module.CASES), ("lost", module.NODES), ("rehearsed", (REHEARSED,))):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, applicable(cases), ids=str)


@pytest.fixture(scope="module")
def checkout(request):
    return checkout_of(request.module.VARIABLE)


@pytest.fixture(scope="module")
def corpus(checkout, tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")


@pytest.fixture
def fork(request):
    name = request.module.FORK
    return name


@pytest.mark.timeout(1500)
def test_killed_in_forward_or_update_it_ends_in_the_state_of_an_unfailed_run(
    fork, checkout, corpus, case, tmp_path, record_property
):
    """The case runs twice, once killed. What is recorded is for tests/matrix.sh."""
    if "--fp16" in case.options and not computes_in_fp16():
        pytest.skip("this CPU does not compute in fp16")
    unfailed = run(fork, checkout, corpus, case, tmp_path / "unfailed")
    unfailed.require_success()
    record_property("unprotected", "succeeded")
    other = killed(fork, checkout, corpus, case, tmp_path / "killed")
    print(other.output)
    other.require_success()
    record_property("compared", str(require_exact(case, unfailed, other)))


@pytest.mark.timeout(1500)
def test_a_rehearsal_finds_it_exact(fork, checkout, corpus, rehearsed, tmp_path, monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    saved = tmp_path / "saved" if fork == "gpt-neox" else Path(RUN, "saved")  # words are filled in, not files
    script = SCRIPTS[fork](checkout, corpus, rehearsed, tmp_path, saved)
    words = [*script, *rehearsed.protected]
    rehearse(tmp_path, rehearsed.ranks, words, seconds=2 * RUN_SECONDS)


@pytest.mark.timeout(1500)
def test_a_lost_node_is_replaced_and_the_run_ends_in_the_state_of_an_unfailed_one(
    fork, checkout, corpus, lost, tmp_path, monkeypatch
):
    """The case runs on one node, unfailed, and on two, of which the second is lost and replaced."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    unfailed = run(fork, checkout, corpus, lost, tmp_path / "unfailed")
    unfailed.require_success()
    saved, half = tmp_path / "saved", lost.ranks // 2
    saved.mkdir()
    script = SCRIPTS[fork](checkout, corpus, lost, tmp_path, saved)
    command = [str(word) for word in ("--nproc-per-node", half, *script, *lost.protected)]
    job = tmp_path / "job"
    job.mkdir()
    with DrivenJob(f"{lost.name}-nodes", command, job, job / "none", lost.iterations, nodes=2) as running:
        deadline, killed_one = time.monotonic() + RUN_SECONDS, False
        while running.follow(0.1, RUN_SECONDS).phase is not DrivePhase.DONE:
            assert time.monotonic() < deadline, running.tail(60)
            committed = [e.fields["iteration"] for e in running.events() if e.name == "version.committed"]
            if not killed_one and max(committed, default=0) >= LOST_FROM:
                running.kill_node()
                killed_one = True
        assert killed_one, "the job ended before its node was lost"
        reported = running.events()
    rebuilt = [event for event in reported if event.name == "slot.rebuilt"]
    assert sorted(event.fields["about"] for event in rebuilt) == list(range(half, lost.ranks)), "of the lost node"
    found = comparison(unfailed.saved, saved, lost.iterations)
    assert not found.differences, "\n".join([str(found), *found.differences])
