"""`ft-plugins status` of a job that trains, is killed, restarts and ends; and of one in each state."""

import re
import signal
import time

from ft_plugins.cli import status_command
from ft_plugins.cli.status_facts import facts_of, is_over
from ft_plugins.rehearse.driver import free_port
from ft_plugins.smp.serve.client import Client

KILLED_AT, SECONDS = 5, 60.0


def test_status_counts_the_restart_and_the_downtime_of_a_killed_rank_and_ends_with_the_job(
    torch_server, jobs, tmp_path
):
    argv = ("--iterations", "60", "--seconds", "0.1", "--mib", "8", "--journal", str(tmp_path / "journal"))
    faults = f"iteration.forward@iteration={KILLED_AT},restart=0,rank=1:kill"
    flags = ("--reft", "--ftp-faults", faults)
    job = torch_server.start(jobs(entry="harness.fills:main", argv=argv, flags=flags, nproc=2))

    def seen(until):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            (facts,) = facts_of([job.spec.run_dir])
            if until(facts):
                return facts
            time.sleep(0.02)
        raise AssertionError(facts)

    before = seen(lambda facts: (facts["iteration"] or 0) >= 1)
    assert (before["restarts"], before["downtime_seconds"], before["ranks"], before["world_size"]) == (0, 0.0, 2, 2)
    down = seen(lambda facts: facts["down_for_seconds"] is not None)
    assert down["iteration"] < KILLED_AT and "; down for " in status_command.text_of([down], 80)
    after = seen(lambda facts: (facts["iteration"] or 0) > KILLED_AT + 2 and facts["restarts"] > 0)
    assert (after["restarts"], after["down_for_seconds"], after["ft_run_alive"]) == (1, None, True)
    assert 0 < after["downtime_seconds"] < SECONDS and after["iteration_age_seconds"] < SECONDS
    assert after["newest"]["process"]["iteration"] >= KILLED_AT and after["protection"] is None
    assert "1 restart; was down for " in status_command.text_of([after], 80)
    assert not is_over(job.spec.run_dir)
    outcome = job.wait(SECONDS)
    assert (outcome["status"], outcome["restarts"]) == ("succeeded", 1), job.tail()
    assert is_over(job.spec.run_dir)


GATED = """
import time
from pathlib import Path
from harness import fills

def main(argv):
    while not Path(argv[0]).exists():
        time.sleep(0.02)
    fills.main(argv[1:])
"""


def test_status_says_in_each_state_what_is_known_and_what_to_do(torch_server, jobs, tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    gate, entry = tmp_path / "gate", f"{tmp_path / 'gated.py'}:main"
    stopped = ("--ftp-faults", "iteration.forward@iteration=4,rank=1:stop")

    def job(*words, flags=(), **more):
        argv = (str(gate), "--iterations", "100000", "--seconds", "0.05", "--mib", "4", *words)
        argv += ("--journal", str(tmp_path / "journal"))
        return jobs(entry=entry, argv=argv, flags=("--reft", *flags), nproc=2, **more)

    def until(spec, state, headline, remedy="nothing to do"):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            (facts,) = facts_of([spec.run_dir])
            if facts["state"] == state and re.search(headline, facts["headline"]):
                break
            time.sleep(0.02)
        assert facts["state"] == state and re.search(headline, facts["headline"]), facts
        assert facts["remedy"].startswith(remedy), facts
        text = status_command.text_of([facts], 80)
        assert max(map(len, text.splitlines())) <= 80 and f": {state}" in text.splitlines()[0]
        print(f"{text}\n")
        return facts

    again = "give the same command again to resume from memory, or drop it: ft-plugins end"
    spec = job(flags=stopped)
    first = torch_server.start(spec)
    until(spec, "STARTING", "^the ranks start$")
    gate.touch()
    until(spec, "TRAINING", "^all ranks of this node train$")
    until(spec, "HUNG", "^rank 1 is stopped by a signal; the others wait$", "continue the process")
    first.kill()
    until(spec, "ORPHANED", r"^ft-run is gone .* iteration 3 in memory is kept for another \d\d\.\d min$", again)

    refused = torch_server.start(job("--tensors", "5"))
    assert refused.wait(SECONDS)["status"] == "refused"
    until(spec, "REFUSED", r"^\d+ s ago, exit status 78: .*tensors: 37 -> 5", "remove the reason, then give")

    second = torch_server.start(job())
    until(spec, "TRAINING", "^all ranks of this node train$")
    second.kill(signal.SIGTERM)
    second.wait(SECONDS)
    ended = r"^\d+ s ago, signalled, exit status 143: by SIGTERM; "
    until(spec, "ENDED", ended + r"iteration \d+ in memory is kept for another", again)
    with Client(spec.run_dir) as client:
        client.end()
    until(spec, "ENDED", ended + "nothing is in memory$", "give the same command again: it starts from a check")

    two = torch_server.start(job(nnodes=2, endpoint=f"localhost:{free_port()}"))
    until(spec, "WAITING", r"^waiting for 1 more of 2 nodes, for \d+ s so far$", "start the missing nodes")
    two.kill(signal.SIGTERM)
    two.wait(SECONDS)

    last = torch_server.start(job("--iterations", "3"))
    assert last.wait(SECONDS)["status"] == "succeeded", last.tail()
    after = until(spec, "ENDED", r"^\d+ s ago, succeeded, exit status 0$")
    assert after["iteration"] == 3, "how far it came is known after its end, too"
