"""Whatever a command line, a file or an environment says: a configuration, or one line in the project's own words."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ft_plugins import cli
from ft_plugins.base import faults, intake
from ft_plugins.config import Config, deepspeed_json, launch_context, worker_environment
from ft_plugins.errors import ConfigError, FtError
from ft_plugins.launcher.rendezvous.endpoint import Endpoint
from harness.hostile import altered, damaged, nested

BLOCK = {
    "job": "j", "resume": "auto", "detect_seconds": 5, "faults": "update.begin@hit=1,iteration%2=0:stop",
    "reft": {"interval": 2, "redundancy": "raim5", "exchange_mbps": 1.5, "checkpoint_dir": "/x", "checkpoint_keep": 3},
    "paft": {"mode": "sync", "h": 3, "audit_interval": 2, "average_optimizer_state": True},
}  # fmt: skip
FLAGS = ["--reft", "--reft-exchange-mbps=1.5", "--paft", "--paft-h", "3", "--ftp-job", "j", "train.py", "--lr", "1"]
HJSON = b"{\n# a comment\n zero: {stage: 1}\n ft_plugins: {reft: {interval: 4}}\n}"
MANY = settings(derandomize=True, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
RANDOM = st.randoms(use_true_random=False)


def one_line(read):
    """What it was refused with, '' if it was not: a line that no terminal obeys."""
    try:
        read()
    except FtError as error:
        line = str(error)
        assert line.isprintable() and len(line) < 2000, line[:200]
        return line
    return ""


def text(content, source):
    """As Python reads arguments, or worse."""
    return content.decode("utf-8", source.choice(["surrogateescape", "replace"])) + source.choice(["", "", "\ud800"])


@given(RANDOM)
@MANY
def test_any_block_is_a_configuration_or_a_line(source):
    block = altered(BLOCK, source)
    for read in (Config.from_json, lambda found: deepspeed_json.from_mapping({"ft_plugins": found})):
        if not one_line(lambda read=read: read(block)):
            found = read(block)
            found.table().encode()
            assert Config.from_json(json.loads(json.dumps(found.block())), whole=False) == found


@given(RANDOM)
@MANY
def test_any_flags_are_a_configuration_or_a_line(source):
    words = list(FLAGS)
    at = source.randrange(len(words))
    words[at] = text(damaged(words[at].encode(), source), source)
    one_line(lambda: Config.from_flags(words))


@given(RANDOM)
@MANY
def test_any_file_is_a_configuration_or_a_line(tmp_path, source):
    path = tmp_path / "ds.json"
    path.write_bytes(damaged(source.choice([HJSON, json.dumps({"ft_plugins": BLOCK}).encode()]), source))
    one_line(lambda: deepspeed_json.from_file(path))


@given(RANDOM)
@MANY
def test_any_environment_is_a_context_or_a_line(source):
    environment = dict(worker_environment(Config.from_json(BLOCK), Path("/tmp/x"), 3, 7))
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    name = source.choice(sorted(environment))
    environment[name] = text(damaged(environment[name].encode(), source), source)
    one_line(lambda: launch_context(environment))


@given(RANDOM)
@MANY
def test_any_faults_are_armed_or_refused_and_strike_nothing_that_they_do_not_name(source):
    words = text(damaged(b"a@iteration%500=0,rank=3:hold;b@c=d:hold", source), source)

    def arm():
        faults.arm(words, rank=source.choice([3, "x"]))
        for iteration in (500, "x", None, -1):
            faults.reach("a", iteration=iteration)

    one_line(arm)


@given(RANDOM)
@MANY
def test_any_endpoint_is_one_or_a_line(source):
    words = text(damaged(source.choice([b"h:1", b"[::1]:5", b"::1"]), source), source)
    if not one_line(lambda: Endpoint.read(words)):
        assert 0 <= Endpoint.read(words).port < 65536


@pytest.mark.parametrize("words", ["h:²", "h:٣", "h:" + "9" * 5000, "\x1b[2J:x"])
def test_a_port_is_made_of_ascii_digits(words):
    assert "--rdzv-endpoint: expected host:port" in one_line(lambda: Endpoint.read(words))


@pytest.mark.parametrize(
    ("block", "line"),
    [
        ({"reft": {"interval": True}}, "ft_plugins.reft.interval: expected an integer >= 1, or auto, found True"),
        ({"reft": {"interval": 10**10}}, "maximum 1,000,000,000, found 10000000000"),
        ({"reft": {"wait_seconds": 1e300}}, "maximum 1,000,000,000, found 1e+300"),
        ({"reft": {"wait_seconds": float("nan")}}, "ft_plugins.reft.wait_seconds: expected a number >= 0, found nan"),
        ({"reft": {"checkpoint_dir": "\ud800"}}, "expected a folder that all nodes share, found '\\ud800'"),
        ({"reft": {"checkpoint_dir": "/a\0b"}}, "expected a folder that all nodes share, found '/a\\x00b'"),
        ({"job": "\ud800"}, "ft_plugins.job: expected 1 to 48 letters"),
        ({"\x1b[2Jreft": 1}, "ft_plugins.\\x1b[2Jreft: unknown key; did you mean ft_plugins.reft?"),
        ({"reft": {"redundancy": nested(600)}}, "ft_plugins: it is nested more than 32 deep"),
        (nested(5000), "ft_plugins: expected an object, found [[[[[[[...]]]]]]]"),
    ],
)
def test_what_does_not_fit_is_said_by_key_and_value(block, line):
    assert line in one_line(lambda: Config.from_json(block))


@pytest.mark.parametrize("value", ["nan", "inf", "1e400", "1e300", "9" * 5000, "\ud800", "²"])
def test_a_flag_takes_numbers_that_there_are(value):
    assert "--reft-wait-seconds: expected a number >= 0" in one_line(
        lambda: Config.from_flags(["--reft", f"--reft-wait-seconds={value}"])
    )


def test_a_configuration_is_a_file_of_a_size_that_can_be_one(tmp_path):
    path = tmp_path / "ds.json"
    os.mkfifo(path)
    assert "cannot be read (it is not a regular file)" in one_line(lambda: deepspeed_json.from_file(path))
    path.unlink()
    path.write_bytes(b" " * (5 << 20))
    assert "it has more than 4194304 bytes" in one_line(lambda: deepspeed_json.from_file(path))


def test_a_message_that_quotes_escape_codes_writes_them_out():
    error = ConfigError("found \x1b[2J\udc80\x9b and\tthe like\n")
    assert str(error) == "found \\x1b[2J\\udc80\\x9b and\tthe like\n"


def test_escape_codes_of_a_command_line_do_not_reach_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ft-plugins", "config", "--", "--reft-\x1b]0;x\x07=1"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "\x1b" not in (err := capsys.readouterr().err) and "unknown" in err


# ---- what every boundary uses ----


def test_nesting_is_counted_to_its_bound():
    def text(depth):
        return "[" * depth + "]" * depth

    assert intake.json_value(text(intake.DEPTH)) and intake.json_value('{"a": ' + text(31) + "}")
    for deep in (text(intake.DEPTH + 1), text(100_000), '{"a": ' * 40 + "1" + "}" * 40):
        with pytest.raises(intake.Unfit, match="nested more than 32 deep"):
            intake.json_value(deep)


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 1 << 63, None, [1]])
def test_a_count_is_an_integer_from_0_on_and_no_boolean(value):
    with pytest.raises(intake.Unfit):
        intake.typed(TypeAdapter(intake.Count), value)


def test_a_call_that_hangs_is_left_behind_in_time():
    import threading

    go_on = threading.Event()
    with pytest.raises(TimeoutError, match=r"the disk did not answer within 0\.05 s"):
        intake.within(0.05, go_on.wait, "the disk")
    go_on.set()
    assert intake.within(10, lambda: 5) == 5
    with pytest.raises(KeyError):
        intake.within(10, lambda: {}["x"])
