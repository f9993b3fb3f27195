"""The block in a DeepSpeed configuration: what DeepSpeed would pass over in silence is one clear line here."""

import json

import pytest

from ft_plugins.config import Config, PaftConfig, deepspeed_json
from ft_plugins.errors import ConfigError
from ft_plugins.launcher import command


def write(folder, text):
    (folder / "ds.json").write_text(text)
    return "ds.json"


@pytest.mark.parametrize(
    "words, path",
    [
        (["--deepspeed_config", "a.json"], "a.json"),
        (["--deepspeed_config=a.json", "--x"], "a.json"),
        (["--deepspeed-config", "a.json", "--deepspeed_config", "b.json"], "b.json"),
        (["--deepspeed", "a.json"], "a.json"),
        (["--deepspeed=a.json", "--x"], "a.json"),
        (["--deepspeed", "--deepspeed_config", "b.json"], "b.json"),
        (["--deepspeed", "corpus"], None),
        (["--deepspeed"], None),
        (["--deepspeed_config"], None),
    ],
)
def test_the_file_is_found_among_a_scripts_arguments(words, path):
    assert deepspeed_json.config_path(words) == path


def test_a_block_means_what_the_flags_mean(tmp_path):
    path = tmp_path / write(tmp_path, '{"zero_optimization": {"stage": 1}, "ft_plugins": {"reft": {"interval": 4}}}')
    flags, _ = Config.from_flags(["--reft", "--reft-interval", "4"])
    assert deepspeed_json.from_file(path) == flags
    assert deepspeed_json.from_mapping({"zero_optimization": {}}) == Config()


def test_paft_is_switched_on_by_its_block_with_every_key_that_it_has(tmp_path):
    block = {"mode": "sync", "h": 7, "aggregate": "trimmed", "trim": 2, "average_optimizer_state": True}
    block |= {"audit_interval": 3, "audit_at": "forward", "on_corruption": "average", "bucket_mib": 4}
    path = tmp_path / write(tmp_path, json.dumps({"ft_plugins": {"paft": block}}))
    found = deepspeed_json.from_file(path)
    assert found.systems == ("paft",) and found.paft is not None
    assert found.paft.model_dump() == {**block, "h_min": 5, "h_max": 500, "noise_of": "model"}
    assert found == Config.from_flags(found.flags())[0]
    other = {"ft_plugins": {"paft": {"h": 4, "h_min": 3, "h_max": 9}}}
    assert deepspeed_json.from_mapping(other).paft == PaftConfig(**other["ft_plugins"]["paft"])


def test_a_file_with_comments_is_read_as_deepspeed_reads_it(tmp_path):
    pytest.importorskip("hjson")
    path = tmp_path / write(tmp_path, '{\n  // two replicas\n  "ft_plugins": {"reft": true},\n}')
    assert deepspeed_json.from_file(path).reft is not None


@pytest.mark.parametrize("depth", [40, 100_000])
def test_a_file_with_comments_that_is_nested_too_deeply_is_refused_for_that(tmp_path, depth):
    pytest.importorskip("hjson")
    path = tmp_path / write(tmp_path, '{\n  // deep\n  "x": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(ConfigError, match="ds.json: it is nested more than 32 deep"):
        deepspeed_json.from_file(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"ft_plugins": {"reft": {}}', r"ds.json: line 1, column \d+: not JSON"),
        ("[1, 2]", "ds.json: expected an object, found list"),
        ('{"ft_plugins": 3}', "ds.json: ft_plugins: expected an object, found 3"),
        ('{"ft_plugins": {"reft": 3}}', "ds.json: ft_plugins.reft: expected .*found 3"),
        ('{"ft_plugins": {"reft": {"interval": "4"}}}', "ds.json: ft_plugins.reft.interval: expected an integer >= 1"),
        ('{"ft_plugins": {"reft": {"intervall": 4}}}', "unknown key; did you mean ft_plugins.reft.interval"),
        ('{"ft_plugins": {"paft": {"h_mni": 4}}}', "unknown key; did you mean ft_plugins.paft.h_min"),
        ('{"ft_plugins": {"paft": {"mode": "avg"}}}', "ft_plugins.paft.mode: expected one of dyn, sync, audit"),
        (
            '{"ft_plugins": {"reft": {"redundancy": "raim5"}, "baft": {}}}',
            "ds.json: ft_plugins.reft.redundancy: raim5 contradicts ft_plugins.baft",
        ),
        ('{"ft_plugins": {"reft": {}}, "ft_plugins": {"reft": false}}', "'ft_plugins' is given twice"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_starts(tmp_path, text, message, capsys, monkeypatch):
    name = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        deepspeed_json.from_file(tmp_path / name)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert command.main(["train.py", "--deepspeed_config", name]) == 78
    told = capsys.readouterr().err
    assert told.startswith("ft-run: ") and told.count("\n") == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="absent.json: cannot be read .No such file"):
        deepspeed_json.from_file(tmp_path / "absent.json")


def test_ft_run_reads_the_block_and_leaves_the_scripts_arguments_alone(tmp_path):
    name = write(tmp_path, '{"ft_plugins": {"reft": {"interval": 4}, "job": "one"}}')
    (tmp_path / "train.py").write_text("")
    words = ["--nproc-per-node", "2", "train.py", "--deepspeed_config", name]
    planned = command.plan(words, 1, str(tmp_path), "host")
    assert planned.protected and planned.job == "one"
    assert planned.config.reft is not None and planned.config.reft.interval == 4
    assert planned.torch.training_script_args == ["--deepspeed_config", name]


def test_ft_run_refuses_a_block_that_contradicts_its_flags(tmp_path):
    name = write(tmp_path, '{"ft_plugins": {"reft": {"interval": 4}}}')
    (tmp_path / "train.py").write_text("")
    words = ["train.py", "--deepspeed_config", name, "--reft", "--reft-interval", "2"]
    with pytest.raises(ConfigError, match="the command line says 2, the DeepSpeed configuration says 4; give it once"):
        command.plan(words, 1, str(tmp_path), "host")


def test_a_key_on_the_command_line_has_effect_where_the_block_switches_its_system_on(tmp_path):
    (tmp_path / "train.py").write_text("")

    def planned(block):
        name = write(tmp_path, block)
        words = ["train.py", "--deepspeed_config", name, "--reft-interval", "3"]
        return command.plan(words, 1, str(tmp_path), "host").config

    found = planned('{"ft_plugins": {"reft": {"bucket_mib": 8}}}')
    assert found == Config.from_flags(["--reft", "--reft-interval", "3", "--reft-bucket-mib", "8"])[0]
    for block in ("{}", '{"ft_plugins": {"reft": false}}', '{"ft_plugins": {"baft": {}}}'):
        with pytest.raises(ConfigError, match="--reft-interval: has no effect while --reft is off"):
            planned(block)
    with pytest.raises(ConfigError, match="the command line says 3, the DeepSpeed configuration says 4; give it once"):
        planned('{"ft_plugins": {"reft": {"interval": 4}}}')


def test_a_key_beside_no_system_has_no_effect_and_says_so(tmp_path):
    name = write(tmp_path, '{"ft_plugins": {"resume": "memory"}}')
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match="--ftp-resume: has no effect while no system that protects state is on"):
        command.plan(["train.py", "--deepspeed_config", name], 1, str(tmp_path), "host")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"mode": "sync", "h_max": 4}, "--paft-h-max: has no effect with mode sync, whose interval is h; drop it"),
        ({"h_min": 9, "h_max": 4}, "--paft-h-min: 9 is more than --paft-h-max, 4"),
        ({"audit_interval": 1, "on_corruption": "rollback"}, "rollback needs snapshots; add --reft"),
    ],
)
def test_keys_of_paft_that_do_not_go_together_are_refused_before_deepspeed_acts_on_the_file(tmp_path, block, message):
    pytest.importorskip("deepspeed")
    from ft_plugins.adapters.deepspeed.training import resolve
    from ft_plugins.config import launch_context

    name = write(tmp_path, json.dumps({"ft_plugins": {"paft": block}}))
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match=message):
        command.plan(["train.py", "--deepspeed_config", name], 1, str(tmp_path), "host")
    with pytest.raises(ConfigError, match=message):
        resolve(str(tmp_path / name), launch_context())
