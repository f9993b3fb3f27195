"""A gpt-neox job names its configuration in its arguments: ft-run finds our block there, before anything is started."""

import pytest

from ft_plugins.config import Config, deepspeed_json
from ft_plugins.config.neox_yaml import settings_in_arguments
from ft_plugins.errors import ConfigError

pytest.importorskip("yaml")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "125M.yml").write_text(
        '{\n  # a comment\n  "num-layers": 12,\n  "fp16": {"enabled": true},\n}'
    )
    (tmp_path / "configs" / "ours.yml").write_text('ft_plugins: {"reft": {"interval": 2}}\ndistributed_backend: gloo\n')
    (tmp_path / "configs" / "odd.yml").write_text("a: [1\nb: }")
    return tmp_path


def test_files_are_joined_and_a_missing_ending_is_added_as_gpt_neox_does(folder):
    found = settings_in_arguments(["-d", "configs", "125M", "ours.yml"], folder)
    assert (found["num_layers"], found["distributed_backend"]) == (12, "gloo")
    assert settings_in_arguments(["configs/125M.yml"], folder)["fp16"] == {"enabled": True}


def test_the_block_reaches_ft_run(folder):
    words = ["--conf_dir", "configs", "125M.yml", "ours.yml"]
    found = deepspeed_json.from_arguments(words, folder)
    assert found.reft is not None and found.reft.interval == 2
    assert deepspeed_json.from_arguments(["-d", "configs", "125M.yml"], folder) == Config()


def test_a_wrong_key_in_it_is_refused(folder):
    (folder / "wrong.yml").write_text("ft_plugins: {reft: {intervall: 2}}")
    with pytest.raises(ConfigError, match=r"the yml files: ft_plugins.reft.intervall: unknown key"):
        deepspeed_json.from_arguments(["wrong.yml"], folder)


def test_files_that_are_not_there_or_no_mapping_are_left_to_the_script(folder):
    (folder / "list.yml").write_text("- 1")
    for words in (["missing.yml"], ["list.yml"], ["configs/odd.yml"], ["--steps", "125M"], ["configs"], []):
        assert settings_in_arguments(words, folder) == {}, words
