"""Which versions of Megatron-LM lie in a folder."""

import pytest

from harness.megatron_lm import CheckoutError, checkouts_in

INFO = "MAJOR = {}\nMINOR = {}\nPATCH = {}\nPRE_RELEASE = ''\n"


def make(root, name, *number):
    folder = root / name
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "pretrain_gpt.py").touch()
    (folder / "megatron" / "core" / "package_info.py").write_text(INFO.format(*number))
    return folder


def test_tags_are_versions_and_another_folder_is_what_it_says_with_its_name(tmp_path):
    make(tmp_path, "core_v0.9.0", 0, 9, 0)
    make(tmp_path, "HEAD", 0, 20, 0)
    make(tmp_path, "core_v0.19.0", 0, 19, 1)  # upstream had counted on before it set the tag
    make(tmp_path, "my fork", 0, 19, 1)
    (tmp_path / "notes").mkdir()
    found = checkouts_in(tmp_path)
    assert [str(one) for one in found] == ["0.9.0", "0.19.0", "0.19.1-my_fork", "0.20.0-HEAD"]
    assert found[1].folder == tmp_path / "core_v0.19.0"


def test_a_folder_whose_version_is_another_than_its_name_says_is_refused(tmp_path):
    misnamed = make(tmp_path, "core_v0.16.1", 0, 17, 0)
    with pytest.raises(CheckoutError, match=r"core_v0\.16\.1: its .* states version 0\.17\.0"):
        checkouts_in(tmp_path)
    (misnamed / "megatron" / "core" / "package_info.py").write_text("MAJOR = 'none'\n")
    with pytest.raises(CheckoutError, match="expected MAJOR, MINOR and PATCH"):
        checkouts_in(tmp_path)
