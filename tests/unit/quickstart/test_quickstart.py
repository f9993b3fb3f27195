"""The quickstart's decisions: what it runs, what it refuses, when it strikes."""

from pathlib import Path

import pytest

from ft_plugins.bubbles.profile import Profiling
from ft_plugins.config import Config
from ft_plugins.events import Event
from ft_plugins.rehearse.driver import DriveError, DrivePhase, Progress
from quickstart import FAILED_STATUS, LINK_MBPS, PROFILED, follow, main, parse


def test_both_runs_are_the_same_command_but_for_their_files(tmp_path):
    plan = parse(["--out", str(tmp_path), "--iterations", "40"])
    one, other = plan.arguments(tmp_path / "one"), plan.arguments(tmp_path / "other")
    assert [word.replace("/other/", "/one/") for word in other] == one
    config, words = Config.from_flags(one)
    assert config.reft is not None and config.reft.interval == 1 and config.resume == "auto" and not config.faults
    assert config.transcript_dir == str(tmp_path / "one" / "transcript")
    for flag, value in (("--nproc-per-node", "8"), ("--tp", "2"), ("--pp", "2"), ("--iterations", "40")):
        assert words[words.index(flag) + 1] == value
    assert "--distributed-optimizer" in words and "--data" not in words
    assert plan.kill_at == 20


def test_with_deepspeed_both_runs_have_one_configuration_whose_block_protects_them(tmp_path):
    plan = parse(["--framework", "deepspeed", "--out", str(tmp_path), "--iterations", "40"])
    words = plan.arguments(tmp_path / "one")
    config, rest = Config.from_flags(words, whole=False)
    assert not config.systems, "no flag of ours switches a system on"
    assert rest[2].endswith("deepspeed_gpt.py")
    assert rest[rest.index("--deepspeed_config") + 1] == str(tmp_path / "deepspeed.json")
    assert plan.settings is not None and Config.from_json(plan.settings["ft_plugins"]).reft is not None


def test_with_baft_the_stages_are_on_two_nodes_and_one_of_them_is_killed(tmp_path):
    plan = parse(["--baft", "--out", str(tmp_path)])
    config, rest = Config.from_flags(plan.arguments(tmp_path / "one"))
    assert config.baft is not None and config.reft is not None
    assert config.baft.link_mbps == LINK_MBPS and config.baft.profile_iterations == PROFILED
    assert rest[rest.index("--nproc-per-node") + 1] == "4" and plan.nodes == 2 and plan.rank is None
    assert rest[rest.index("--tp") + 1] == "1" and rest[rest.index("--pp") + 1] == "4"
    assert parse(["--baft", "--kill-rank", "3"]).rank == 3
    assert parse(["--out", str(tmp_path)]).rank == 5, "without it: a rank"
    settings = parse(["--baft", "--framework", "deepspeed"]).settings
    assert settings is not None
    block = Config.from_json(settings["ft_plugins"])
    assert block.baft == config.baft and block.reft == config.reft


def test_with_a_policy_replicas_are_synchronised_before_the_kill(tmp_path):
    plan = parse(["--policy", "edit", "--quick", "--out", str(tmp_path)])
    config, rest = Config.from_flags(plan.arguments(tmp_path / "one"))
    assert config.sync is not None and config.sync.policy == "edit" and config.sync.tau == 3 <= plan.kill_at
    assert rest[rest.index("--num-distributed-optimizer-instances") + 1] == "2", "an instance is one replica"
    assert parse(["--policy", "edit"]).sync == ("--sync", "--sync-policy=edit", "--sync-tau=8")
    settings = parse(["--policy", "diloco", "--framework", "deepspeed"]).settings
    assert settings is not None
    block = Config.from_json(settings["ft_plugins"])
    assert block.sync is not None and (block.sync.policy, block.sync.shard_ranks) == ("diloco", 1)
    assert parse([]).sync == ()


def test_with_baft_a_quick_run_is_long_enough_for_a_plan_before_the_kill_and_after_it():
    plan = parse(["--baft", "--quick"])
    planned_at = Profiling().warmup + PROFILED + 3  # messages take three iterations
    assert plan.kill_at >= planned_at + 4
    assert plan.iterations - plan.kill_at >= planned_at + 4


def test_the_given_text_is_what_both_runs_learn_from(tmp_path):
    (tmp_path / "text").write_text("some text")
    words = parse(["--data", str(tmp_path / "text")]).arguments(tmp_path)
    assert words[words.index("--data") + 1] == str(tmp_path / "text")


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--data", "/nowhere/text"], "--data /nowhere/text: expected a text file"),
        (["--data", "/dev/null"], "--data /dev/null: expected a text file"),
        (["--iterations", "10", "--kill-at", "9"], "--kill-at 9: expected 2 to 8, of 10 iterations"),
        (["--iterations", "3"], "--kill-at 1: expected 2 to 1"),
        (["--policy", "edit", "--baft"], "--policy: local SGD and --baft exclude each other"),
        (["--kill-rank", "8"], "--kill-rank 8: expected 0 to 7"),
        (["--out", "/dev/null/out"], "--out /dev/null/out: Not a directory; name a writable folder"),
    ],
)
def test_what_cannot_be_run_is_one_line(argv, message, capsys):
    assert main(argv) == FAILED_STATUS
    error = capsys.readouterr().err
    assert error.startswith(f"quickstart: {message}") and error.count("\n") == 1


class Script:
    """A job that goes through `moments`, as `DrivenJob` shows them."""

    log = Path("output.log")

    def __init__(self, moments, committed_at=0):
        self.moments, self.kills = moments, []
        self.committed_at = committed_at  # iteration
        self.lost = 0

    def events(self):
        return [Event("version.committed", 0.0)] if self.iteration >= self.committed_at else []

    def follow(self, seconds, patience):
        self.now, self.iteration = self.moments.pop(0)
        return Progress(self.now, self.iteration, None, 8, 0.0)

    def kill(self, rank):
        self.kills.append((rank, self.now, self.iteration))
        return 4711

    def kill_node(self):
        self.lost += 1
        return "node1", "node2"


class Silent:
    """Shows nothing."""

    def __getattr__(self, name):
        return lambda *given: None


def strikes(moments, kill=True):
    job, display = Script(moments), Silent()
    plan = parse(["--iterations", "10", "--kill-at", "4", "--kill-rank", "3"])
    follow(job, plan, kill, display)
    return job.kills


def test_one_process_is_killed_once_and_not_before_its_iteration_is_logged():
    before = [(DrivePhase.STARTING, 0), (DrivePhase.TRAINING, 3)]
    after = [(DrivePhase.RESTARTING, 5), (DrivePhase.TRAINING, 6), (DrivePhase.ENDING, 10), (DrivePhase.DONE, 10)]
    assert strikes([*before, (DrivePhase.TRAINING, 5), *after]) == [(3, DrivePhase.TRAINING, 5)]
    assert strikes([*before, (DrivePhase.TRAINING, 5), *after], kill=False) == []


def test_a_whole_node_is_killed_once_when_a_version_is_committed():
    moments = [(DrivePhase.TRAINING, iteration) for iteration in (3, 4, 5, 6)]
    job = Script([*moments, (DrivePhase.DONE, 30)], committed_at=5)
    said = []
    display = Silent()
    display.say = said.append
    follow(job, parse(["--baft", "--quick", "--kill-at", "4"]), True, display)
    assert job.lost == 1 and not job.kills
    (line,) = said
    assert line.startswith("SIGKILL sent to all processes of node1") and line.endswith("after iteration 5 was logged")


def test_a_job_that_ends_before_anyone_was_killed_is_no_failed_run():
    with pytest.raises(DriveError, match=r"no process was killed; see output\.log"):
        strikes([(DrivePhase.STARTING, 0), (DrivePhase.ENDING, 10), (DrivePhase.DONE, 10)])
