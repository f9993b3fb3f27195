"""The schema and its spellings: what is accepted, what is refused, and in which words."""

import argparse
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from ft_plugins.config import (
    Config,
    LaunchContext,
    PaftConfig,
    ReftConfig,
    add_flags,
    keys,
    launch_context,
    merge,
    run_directory,
    worker_environment,
)
from ft_plugins.config.keys import derive
from ft_plugins.errors import ConfigError

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}", fullmatch=True)
reft_blocks = st.fixed_dictionaries({}, optional={"interval": st.integers(1, 9999), "bucket_mib": st.integers(1, 1024)})
blocks = st.fixed_dictionaries(
    {"reft": reft_blocks},
    optional={
        "job": names,
        "node_name": names,
        "resume": st.sampled_from(["auto", "memory", "storage", "fresh", "before:40"]),
        "require_protection": st.booleans(),
        "orphan_seconds": st.floats(0, 1e9),
        "max_unprotected_steps": st.integers(1, 10**9),
        "faults": st.sampled_from(["", "iteration.forward@iteration=6,rank=3:kill"]),
    },
)


def refusal(call, *arguments, **named):
    """The one line with which `call` refuses its arguments."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ one schema


@given(blocks)
def test_every_spelling_leads_back_to_the_same_configuration(block):
    config = Config.from_json(block)
    assert Config.from_json(json.loads(json.dumps(config.block()))) == config
    assert Config.from_flags(config.flags()) == (config, [])
    parser = argparse.ArgumentParser()
    add_flags(parser)
    assert Config.from_namespace(parser.parse_args(config.flags())) == config


@given(blocks)
def test_what_was_given_survives_the_way_through_the_environment(block):
    config = Config.from_json(block)
    told = launch_context(worker_environment(config, Path("/run/x"), 7, 42)).config
    assert told is not None and told.given() == config.given()


def test_every_key_says_what_it_means_and_what_it_expects():
    assert all(key.meaning and key.expected and not key.meaning.endswith(".") for key in keys())
    assert len({key.flag for key in keys()}) == len({key.dest for key in keys()}) == len(keys())


def test_general_keys_are_ftp_flags_and_a_systems_keys_carry_its_name():
    flags = {key.name: key.flag for key in keys()}
    assert flags["max_unprotected_steps"] == "--ftp-max-unprotected-steps"
    assert flags["reft"] == "--reft"
    assert flags["reft.bucket_mib"] == "--reft-bucket-mib"


def test_encryption_without_a_secret_is_refused():
    with pytest.raises(ConfigError, match="^--ftp-encrypt: has no effect while --ftp-secret-file is unset; give --"):
        Config.from_flags(["--reft", "--ftp-encrypt"])
    with pytest.raises(ConfigError, match=r"^ft_plugins\.encrypt: has no effect while ft_plugins\.secret_file is"):
        Config.from_json({"reft": True, "encrypt": True})
    config, _ = Config.from_flags(["--reft", "--ftp-encrypt", "--ftp-secret-file", "s"])
    assert config.encrypt and not Config.from_json({"reft": True, "encrypt": False}).encrypt


def test_a_further_system_needs_only_its_class():
    from pydantic import Field

    from ft_plugins.config import SystemConfig

    class SecondConfig(SystemConfig):
        level: int = Field(2, ge=1, description="how deep")

    class Wider(Config):
        second: SecondConfig | None = Field(None, description="switch on the second")

    added = [key for key in derive(Wider, "ftp") if key.path[0] == "second"]
    assert [(key.flag, key.dest, key.switch, key.expected) for key in added] == [
        ("--second", "second", True, "an object, true or false"),
        ("--second-level", "second_level", False, "an integer >= 1"),
    ]


def test_no_key_holds_a_secret():
    suspicious = [key.name for key in keys() if any(w in key.name for w in ("secret", "password", "token", "key"))]
    assert suspicious == ["secret_file"], "the name of a file that only its owner can read"


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Config().job = "x"


def test_the_table_shows_every_effective_value_and_marks_the_defaults():
    table = Config.from_json({"reft": {"interval": 3}, "baft": True, "paft": True}).table().splitlines()
    shown = [key for key in keys() if key.path[0] != "sync" or key.system]  # local SGD is off: it contradicts PAFT
    assert len(table) == 1 + len(shown)
    rows = [line.split() for line in table]
    assert ["--reft-interval", "3", "iterations"] in rows
    assert ["--reft-bucket-mib", "4", "MiB", "default"] in rows
    assert ["--ftp-orphan-seconds", "1800", "seconds", "default"] in rows


def test_a_start_shows_what_differs_from_the_defaults_and_where_the_rest_is():
    """A value that is given and is the default is no news; one that another key decides on is, if it was given."""
    given = {"reft": {"interval": 1, "bucket_mib": 8}, "baft": True, "job": "gpt"}
    lines = Config.from_json(given).table(all_keys=False).splitlines()
    rows = [line.split() for line in lines]
    assert rows[1:-1] == [["--ftp-job", "gpt"], ["--reft", "on"], ["--reft-bucket-mib", "8", "MiB"], ["--baft", "on"]]
    shown = [key for key in keys() if key.path[0] not in ("paft", "sync") or key.system]
    assert lines[-1] == f"  {len(shown) - 4} more have their defaults: `ft-plugins config -- FLAGS` shows all"
    assert all(len(line) <= 80 for line in lines)


def test_a_start_shows_a_value_that_another_key_changes():
    table = Config.from_json({"reft": True, "sync": {"tau": 4}}).table(all_keys=False)
    assert ["--reft-interval", "4", "iterations", "default"] in [line.split() for line in table.splitlines()]


def test_what_is_captured_follows_from_the_systems_that_are_on():
    def redundancy(block):
        found = Config.from_json(block).capture
        return found.redundancy if found else None

    assert redundancy({}) is None
    assert redundancy({"reft": True}) == "raim5"
    assert redundancy({"baft": True}) == redundancy({"reft": True, "baft": True}) == "neighbour"
    assert redundancy({"reft": {"redundancy": "raim6"}}) == "raim6"
    assert redundancy({"reft": {"redundancy": "both"}, "baft": True}) == "both"
    interval = Config.from_json({"reft": {"interval": 3}, "baft": True}).capture
    assert interval is not None and interval.interval == 3
    with pytest.raises(ConfigError, match="redundancy: raim5 contradicts ft_plugins.baft"):
        Config.from_json({"reft": {"redundancy": "raim5"}, "baft": True})


def test_the_table_shows_how_snapshots_are_taken_whichever_system_wants_them():
    rows = [line.split() for line in Config.from_json({"baft": True}).table().splitlines()]
    assert ["--reft", "off", "default"] in rows and ["--baft", "on"] in rows
    assert ["--reft-redundancy", "neighbour", "default"] in rows
    assert ["--reft-interval", "1", "iterations", "default"] in rows
    rows = [line.split() for line in Config.from_json({"reft": True}).table().splitlines()]
    assert ["--reft-redundancy", "raim5", "default"] in rows


def test_the_table_leaves_out_the_keys_of_a_system_that_is_off():
    table = Config().table()
    assert "--reft-interval" not in table and "off" in table


STORAGE_KEYS = {"checkpoint_interval": 5, "checkpoint_keep": 3, "checkpoint_seconds": 1.5}


@pytest.mark.parametrize("name", STORAGE_KEYS)
def test_a_key_of_storage_without_a_folder_has_no_effect_and_says_so(name):
    flag = f"--reft-{name.replace('_', '-')}"
    line = refusal(Config.from_flags, ["--reft", flag, str(STORAGE_KEYS[name])])
    needed = "--reft-checkpoint-dir"
    assert line == f"{flag}: has no effect while {needed} is unset; give {needed} or drop {flag}"
    line = refusal(Config.from_json, {"reft": {name: STORAGE_KEYS[name]}})
    assert line.startswith(f"ft_plugins.reft.{name}: has no effect while ft_plugins.reft.checkpoint_dir is unset")
    block = {"reft": {"checkpoint_dir": "/ck", name: STORAGE_KEYS[name]}}
    assert Config.from_json(block).block() == block
    assert Config.from_json({"reft": {name: STORAGE_KEYS[name]}}, whole=False).reft is not None, "the rest may follow"
    with_folder = Config.from_json({"reft": {"checkpoint_dir": "/ck"}}, whole=False)
    assert merge(with_folder, Config.from_json({"reft": {name: STORAGE_KEYS[name]}}, whole=False)).block() == block


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--reft-checkpoint-keep", "0"], "an integer >= 1"),
        (["--reft-checkpoint-interval", "-1"], "an integer >= 0, or auto"),
        (["--reft-checkpoint-dir="], "a folder that all nodes share"),
        (["--reft-checkpoint-seconds", "soon"], "a number >= 0"),
    ],
)
def test_what_a_key_of_storage_expects_is_named(words, expected):
    assert f"expected {expected}, found" in refusal(Config.from_flags, ["--reft", *words])


# ------------------------------------------------------------------------------------------------ JSON


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"reft": {"intervall": 1}}, "ft_plugins.reft.intervall: unknown key; did you mean ft_plugins.reft.interval?"),
        ({"interval": 1}, "ft_plugins.interval: unknown key; did you mean ft_plugins.reft.interval?"),
        ({"Resume": "auto"}, "ft_plugins.Resume: unknown key; did you mean ft_plugins.resume?"),
        ({"raft": {}}, "ft_plugins.raft: unknown key; did you mean ft_plugins.reft?"),
        ({"reft": {"interval": 0}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found 0"),
        ({"reft": {"interval": "1"}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found '1'"),
        ({"reft": {"interval": True}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found True"),
        ({"reft": {"bucket_mib": 2e3}}, "ft_plugins.reft.bucket_mib: expected an integer >= 1 and <= 1024, found 2000"),
        (
            {"reft": {"group_nodes": 1}},
            "ft_plugins.reft.group_nodes: expected an integer >= 2 and <= 256, or auto, found",
        ),
        ({"reft": {"group_nodes": "all"}}, "ft_plugins.reft.group_nodes: expected an integer >= 2 and <= 256, or auto"),
        (
            {"reft": {"group_nodes": 4, "redundancy": "none"}},
            "ft_plugins.reft.group_nodes: has no effect with redundan",
        ),
        (
            {"baft": True, "failure_domain": "rack"},
            "ft_plugins.failure_domain: has no effect with redundancy neighbour",
        ),
        (
            {"reft": {"group_nodes": 3, "redundancy": "raim6"}},
            "ft_plugins.reft.group_nodes: 3 contradicts ft_plugins.re",
        ),
        ({"reft": {"interval": 0}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found 0"),
        ({"reft": {"interval": "often"}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found"),
        (
            {"reft": {"interval": "auto"}, "baft": True},
            "ft_plugins.reft.interval: auto contradicts ft_plugins.baft, whi",
        ),
        (
            {"reft": {"interval": "auto"}, "paft": {"mode": "audit"}},
            "ft_plugins.reft.interval: auto contradicts ft_plugins.paft, which compares replicas of snapshots at a fix",
        ),
        (
            {"reft": {"checkpoint_interval": "auto", "checkpoint_dir": "/ck"}, "sync": {"policy": "diloco"}},
            "ft_plugins.reft.checkpoint_interval: auto contradicts ft_plugins.sync, which takes snapshots at synch",
        ),
        ({"reft": {"checkpoint_interval": "auto"}}, "ft_plugins.reft.checkpoint_interval: has no effect while ft_plug"),
        ({"reft": {"hw_rate": 0.1}}, "ft_plugins.reft.hw_rate: has no effect unless ft_plugins.reft.interval or ft_pl"),
        (
            {"reft": {"interval": "auto", "sw_rate": 101.0}},
            "ft_plugins.reft.sw_rate: expected a number >= 0 and <= 100",
        ),
        ({"failure_domain": "rack"}, "ft_plugins.failure_domain: has no effect while no system that protects state"),
        ({"reft": 3}, "ft_plugins.reft: expected an object, true or false, found 3"),
        ({"reft": {}, "resume": "disk"}, "ft_plugins.resume: expected one of auto, memory, storage, fresh, bef"),
        ({"reft": {}, "orphan_seconds": 1e999}, "ft_plugins.orphan_seconds: expected a number >= 0, found inf"),
        ({"resume": "memory"}, "ft_plugins.resume: has no effect while no system that protects state is on; add --ref"),
        ({"paft": True, "resume": "memory"}, "ft_plugins.resume: has no effect while no system that protects state is"),
        ({"reft": False, "max_unprotected_steps": 5}, "ft_plugins.max_unprotected_steps: has no effect while no"),
        ([], "ft_plugins: expected an object, found []"),
    ],
)
def test_a_json_block_is_refused_with_key_expected_and_found(block, line):
    assert refusal(Config.from_json, block).startswith(line)


def test_intervals_that_the_job_chooses_begin_with_the_defaults_and_go_with_what_has_no_part_in_them():
    flags = ["--reft", "--reft-interval", "auto", "--reft-checkpoint-interval=auto", "--reft-checkpoint-dir", "/ck"]
    config, _ = Config.from_flags([*flags, "--reft-hw-rate", "0.01", "--paft"])
    assert config.capture is not None and config.capture.begins_with == (1, 100)
    assert (config.capture.interval, config.capture.hw_rate, config.capture.sw_rate) == ("auto", 0.01, None)
    assert Config.from_json(config.block()) == config == Config.from_flags(config.flags())[0]
    audited = {
        "reft": {"checkpoint_interval": "auto", "checkpoint_dir": "/ck"},
        "paft": {"mode": "audit"},
        "baft": True,
    }
    assert Config.from_json(audited).capture is not None, "checkpoints alone are chosen"


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"h_min": 9, "h_max": 5}, "ft_plugins.paft.h_min: 9 is more than ft_plugins.paft.h_max, 5; expected the"),
        ({"h": 3}, "ft_plugins.paft.h: expected an interval from ft_plugins.paft.h_min to ft_plugins.paft.h_max, 5 to"),
        ({"mode": "sync", "h_min": 2}, "ft_plugins.paft.h_min: has no effect with mode sync, whose interval is h; "),
        ({"mode": "audit", "h": 20}, "ft_plugins.paft.h: has no effect with mode audit, which averages nothing by"),
        ({"mode": "audit", "audit_interval": 0}, "ft_plugins.paft.audit_interval: 0 contradicts ft_plugins.paft.mode"),
        ({"on_corruption": "average"}, "ft_plugins.paft.on_corruption: has no effect while audit_interval is 0; drop"),
        ({"audit_at": "forward"}, "ft_plugins.paft.audit_at: has no effect while audit_interval is 0; drop it"),
        ({"trim": 2, "aggregate": "median"}, "ft_plugins.paft.trim: has no effect unless aggregate is trimmed; drop"),
        ({"h": 0}, "ft_plugins.paft.h: expected an integer >= 1, found 0"),
        ({"mode": "async"}, "ft_plugins.paft.mode: expected one of dyn, sync, audit, found 'async'"),
        (
            {"mode": "audit", "on_corruption": "rollback"},
            "ft_plugins.paft.on_corruption: rollback needs snapshots; add --reft or --baft, or choose",
        ),
    ],
)
def test_replicas_are_not_synchronised_by_keys_that_contradict_each_other(block, line):
    assert refusal(Config.from_json, {"paft": block}).startswith(line)


def test_audits_come_where_they_are_asked_for_and_bounds_may_come_from_two_sources():
    def every(block):
        return (Config.from_json({"paft": block}).paft or PaftConfig()).audits_every

    assert (every({}), every({"mode": "audit"}), every({"audit_interval": 3}), every({"mode": "sync"})) == (0, 10, 3, 0)
    assert Config.from_json({"paft": True}).capture is None and not Config.from_json({"paft": True}).protects
    file = Config.from_json({"paft": {"h_min": 600, "h": 700}}, whole=False)
    both = merge(Config.from_flags(["--paft-h-max=1000"], whole=False)[0], file)
    assert both.paft == PaftConfig(h=700, h_min=600, h_max=1000)
    with pytest.raises(ConfigError, match="--paft-h-min: 600 is more than --paft-h-max, 500"):
        merge(Config(), Config.from_json({"paft": {"h_min": 600}}, whole=False))


def test_a_key_that_resembles_nothing_is_answered_with_the_known_ones():
    assert refusal(Config.from_json, {"zzz": 1}).startswith("ft_plugins.zzz: unknown key; known: job, node_name, ")


def test_a_system_is_switched_on_by_an_object_or_true_and_off_by_false_or_null():
    assert Config.from_json({"reft": {}}).reft == Config.from_json({"reft": True}).reft == ReftConfig()
    assert Config.from_json({"reft": False}).reft is Config.from_json({"reft": None}).reft is None


def test_a_key_without_effect_is_left_alone_while_another_source_is_to_come():
    partial = Config.from_json({"require_protection": True}, whole=False)
    assert merge(partial, Config.from_json({"reft": {}})).require_protection
    assert "has no effect" in refusal(merge, partial, Config())


# ------------------------------------------------------------------------------------------------ flags


def test_our_flags_are_taken_wherever_they_stand_and_the_rest_is_unchanged():
    words = "--nproc-per-node 8 --reft train.py --lr 1e-3 --reft-interval=2 --ftp-job a --ftp x --title=--reft -- y"
    config, rest = Config.from_flags(words.split())
    assert config == Config(job="a", reft=ReftConfig(interval=2))
    assert rest == "--nproc-per-node 8 train.py --lr 1e-3 --ftp x --title=--reft -- y".split()


def test_a_switch_takes_no_word_that_follows_it():
    config, rest = Config.from_flags(["--reft", "--ftp-require-protection", "train.py", "1"])
    assert config.require_protection and rest == ["train.py", "1"]


def test_a_text_that_only_begins_like_a_flag_of_ours_belongs_to_the_script():
    argv = ["--extra", "--ftp-job is a flag", "--reftor", "--ftpserver=x", "reft", "-reft"]
    assert Config.from_flags(argv) == (Config(), argv)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--reft-interval 2", "--reft-interval: has no effect while --reft is off; add --reft or drop it"),
        ("--ftp-require-protection t.py", "--ftp-require-protection: has no effect while no system that "),
        ("--reft --reft-intervl 2", "--reft-intervl: unknown flag; did you mean --reft-interval?"),
        ("--reft --reft-intervl=2", "--reft-intervl: unknown flag; did you mean --reft-interval?"),
        ("--reft --reft_interval 2", "--reft_interval: unknown flag; did you mean --reft-interval?"),
        ("--ftp-node x", "--ftp-node: unknown flag; did you mean --ftp-node-name?"),
        ("--ftp-xyz=1", "--ftp-xyz: unknown flag; known: --ftp-job --ftp-node-name"),
        ("--reft=1", "--reft: expected no value, found '1'"),
        ("--reft --reft-interval", "--reft-interval: expected an integer >= 1, or auto, found nothing"),
        ("--reft --reft-interval --lr 1", "--reft-interval: expected an integer >= 1, or auto, found '--lr'"),
        ("--reft --reft-interval -3", "--reft-interval: expected an integer >= 1, or auto, found '-3'"),
        ("--reft --reft-interval=often", "--reft-interval: expected an integer >= 1, or auto, found 'often'"),
        ("--reft --reft-interval 1 --reft-interval 2", "--reft-interval: given as 1 and as 2; give it once"),
        ("--ftp-job a/b", "--ftp-job: expected 1 to 48 letters, digits, '.', '_' or '-'"),
        ("--ftp-faults nowhere", "--ftp-faults: fault 'nowhere' cannot be read: expected point@fact=value,...:action"),
    ],
)
def test_a_command_line_is_refused_with_flag_expected_and_found(words, line):
    assert refusal(Config.from_flags, words.split()).startswith(line)


def test_a_flag_given_twice_with_one_value_is_accepted():
    assert Config.from_flags("--ftp-job a --reft --reft --ftp-job=a".split())[0].job == "a"


def parser_of_a_script(**named):
    parser = argparse.ArgumentParser(**named)
    parser.add_argument("--reference")
    add_flags(parser)
    return parser


def test_flags_that_are_not_given_are_none_in_the_namespace():
    namespace = parser_of_a_script().parse_args([])
    assert {getattr(namespace, key.dest) for key in keys()} == {None}
    assert Config.from_namespace(namespace) == Config()


def test_a_namespace_without_our_names_is_a_configuration_of_defaults():
    assert Config.from_namespace(argparse.Namespace(lr=1)) == Config()


def test_an_abbreviated_option_of_the_script_never_becomes_ours(capsys):
    with pytest.raises(SystemExit):
        parser_of_a_script(allow_abbrev=True).parse_args(["--ref", "x"])
    assert "unrecognized arguments: --ref" in capsys.readouterr().err


def test_argparse_refuses_in_the_same_words(capsys):
    with pytest.raises(SystemExit):
        parser_of_a_script().parse_args(["--reft", "--reft-interval", "0"])
    assert "argument --reft-interval: expected an integer >= 1, or auto, found '0'" in capsys.readouterr().err


def test_help_lists_every_flag_with_its_default(capsys):
    text = parser_of_a_script().format_help()
    assert all(key.flag in text for key in keys())
    assert "default: 1800" in " ".join(text.split())


def test_two_sources_are_joined_and_a_contradiction_is_refused_with_both_values():
    line = Config.from_flags(["--reft", "--reft-interval", "2"])[0]
    assert merge(line, Config.from_json({"reft": {"bucket_mib": 4}})).reft == ReftConfig(interval=2, bucket_mib=4)
    assert refusal(merge, line, Config.from_json({"reft": {"interval": 3}}), ("the command line", "ds.json")) == (
        "--reft-interval (ft_plugins.reft.interval): the command line says 2, ds.json says 3; give it once"
    )


def test_a_default_written_out_contradicts_another_value_but_an_unset_one_does_not():
    line = Config.from_flags(["--reft", "--reft-interval", "2"])[0]
    assert "the script says 1" in refusal(merge, line, Config.from_json({"reft": {"interval": 1}}))
    assert merge(line, Config.from_json({"reft": True})) == line
    assert "--reft (ft_plugins.reft)" in refusal(merge, line, Config.from_json({"reft": False}))


# ------------------------------------------------------------------------------------------------ environment

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}


def test_a_worker_of_ft_run_reads_what_ft_run_wrote():
    config = Config.from_json({"job": "a", "reft": {"interval": 2}})
    environ = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"} | worker_environment(config, Path("/run/x"), 9, 77)
    assert launch_context(environ) == LaunchContext(config, Path("/run/x"), 9, 77, 5, 1, 8, 4, 1, 2)


def test_a_worker_of_torchrun_has_a_place_and_no_configuration():
    assert launch_context(TORCHRUN) == LaunchContext(None, None, 0, None, 5, 1, 8, 4, 1, 0)


def test_a_process_without_a_launcher_is_rank_0_of_1():
    assert launch_context({"HOME": "/"}) == LaunchContext(None, None, 0, None, 0, 0, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"WORLD_SIZE": None}, "environment variable WORLD_SIZE: expected an integer, found nothing; start the job"),
        ({"RANK": "first"}, "environment variable RANK: expected an integer, found 'first'"),
        ({"FTP_RUN_DIR": "/run/x"}, "environment variable FTP_TOKEN: expected an integer, found nothing"),
        ({"FTP_CONFIG": "{reft"}, "environment variable FTP_CONFIG: expected JSON, found '{reft'"),
        ({"FTP_CONFG": "{}"}, "environment variable FTP_CONFG: unknown; did you mean FTP_CONFIG?"),
        ({"FTP_CONFIG": '{"reft": {"intervl": 1}}'}, "ft_plugins.reft.intervl: unknown key; did you mean"),
    ],
)
def test_an_incomplete_or_misspelt_environment_is_an_error(change, line):
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    assert refusal(launch_context, environ).startswith(line)


def test_variables_of_other_programs_that_begin_alike_are_left_alone():
    assert launch_context({"FTP_PROXY": "x", "ftp_proxy": "x"}).config is None


# ------------------------------------------------------------------------------------------------ run directory


def test_a_run_directory_is_private_and_the_same_every_time(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = run_directory("job", "node", environ)
    assert folder == tmp_path / "ft_plugins" / "job" / "node" == run_directory("job", "node", environ)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


@pytest.mark.parametrize("runtime", [{}, {"XDG_RUNTIME_DIR": "/nowhere/at/all"}, {"XDG_RUNTIME_DIR": "relative"}])
def test_without_a_usable_runtime_folder_it_lies_in_the_temporary_one(runtime, tmp_path):
    folder = run_directory("job", "node", runtime | {"TMPDIR": str(tmp_path)})
    assert folder == tmp_path / f"ft_plugins-{os.getuid()}" / "job" / "node"


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    (tmp_path / "ft_plugins").mkdir(mode=0o755)
    (tmp_path / "ft_plugins").chmod(0o755)
    line = refusal(run_directory, "job", "node", {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert "with mode 0700" in line and "mode 0755" in line


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "ft_plugins").symlink_to(tmp_path / "elsewhere")
    assert "expected a folder of user" in refusal(run_directory, "job", "node", {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "ft_plugins").write_text("")
    assert "cannot create this folder" in refusal(run_directory, "job", "node", {"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.parametrize(("job", "node"), [("..", "n"), ("a/b", "n"), ("", "n"), ("j", "x" * 49), ("j", "n\n")])
def test_a_name_that_would_leave_the_folder_is_refused(job, node, tmp_path):
    assert "expected 1 to 48 letters" in refusal(run_directory, job, node, {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_path_too_long_for_a_socket_is_refused_before_it_is_made(tmp_path):
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    line = refusal(run_directory, "j" * 48, "n" * 48, {"XDG_RUNTIME_DIR": str(deep)})
    assert "the system allows 107" in line and "--ftp-job" in line
    assert not list(deep.glob("ft_plugins/*"))


@pytest.mark.parametrize(
    ("given", "place"),
    [("9400", ("127.0.0.1", 9400)), ("10.0.0.3:9400", ("10.0.0.3", 9400)), ("[::]:65535", ("::", 65535))],
)
def test_metrics_are_served_on_this_machine_alone_unless_an_address_is_given(given, place):
    config, _ = Config.from_flags(["--reft", "--ftp-metrics", given])
    assert config.metrics_place == place
    assert Config.from_json({"reft": {}}).metrics_place is None
    assert Config.from_json({"reft": {}, "metrics": 9400}).metrics_place == ("127.0.0.1", 9400)


@pytest.mark.parametrize("given", ["0", "65536", "-1", "here:9400", "9400:", "x", "٣"])
def test_a_place_for_metrics_that_is_none_is_refused_by_name(given):
    with pytest.raises(ConfigError, match="^--ftp-metrics: "):
        Config.from_flags(["--reft", f"--ftp-metrics={given}"])


def test_metrics_have_no_effect_without_a_system_that_has_an_smp():
    with pytest.raises(ConfigError, match="--ftp-metrics: has no effect while no system that protects state is on"):
        Config.from_flags(["--ftp-metrics", "9400"])
