"""Which program a package `megatron` belongs to is seen in its files, not in its name or version."""

import sys
from types import ModuleType

import pytest

from ft_plugins.patches import MegatronPackage, cpu_patches, package_in
from ft_plugins.patches import megatron_forks as forks

DEEPSPEED = "model, *_ = deepspeed.initialize(\n    model=model)"


def package(folder, **files):
    for name, text in files.items():
        file = folder / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def test_an_early_megatron_core_of_megatron_deepspeed_is_not_taken_for_megatron_lm(tmp_path):
    core = {"core__package_info": "MAJOR = 0\nMINOR = 2"}
    fork = package(tmp_path / "fork", training=f"import deepspeed\n{DEEPSPEED}", **core)
    early = package(tmp_path / "early", training="def pretrain(): ...", **core)
    recent = package(tmp_path / "recent", training__training="def pretrain(): ...", **core)
    neox = package(tmp_path / "neox", training=f"import deepspeed\n{DEEPSPEED}", neox_arguments__arguments="")
    assert package_in([fork]) is MegatronPackage.MEGATRON_DEEPSPEED
    assert package_in([neox]) is MegatronPackage.GPT_NEOX
    assert package_in([early]) is package_in([recent]) is package_in([]) is MegatronPackage.MEGATRON_LM


def test_each_program_has_its_own_patches():
    modules = {
        one: {patch.module.partition(".")[0:3:2] for patch in cpu_patches(package=one) if "megatron" in patch.module}
        for one in MegatronPackage
    }
    assert modules[MegatronPackage.MEGATRON_DEEPSPEED] == {("megatron", "data.dataset_utils")}
    assert modules[MegatronPackage.GPT_NEOX] == {("megatron", "data.data_utils")}
    assert ("megatron", "core.jit") in modules[MegatronPackage.MEGATRON_LM]
    of_torch = {patch.symbol for patch in cpu_patches(package=MegatronPackage.MEGATRON_DEEPSPEED)}
    assert "current_device" not in of_torch, "it asks DeepSpeed for its device"


def test_what_deepspeed_has_removed_can_be_imported_and_says_so_when_it_is_used(monkeypatch):
    monkeypatch.setattr(forks, "_COMPRESS", "json.compress")  # any package without such a module
    monkeypatch.setitem(sys.modules, "json.compress", ModuleType("unset"))
    del sys.modules["json.compress"]
    forks.with_compression(ModuleType("deepspeed"))
    with pytest.raises(forks.UnsupportedError, match="drop compression_training"):
        sys.modules["json.compress"].init_compression("model")
