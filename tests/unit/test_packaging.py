"""Metadata, pins, links and the setup script: what a new user meets first."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"[A-Za-z0-9._-]+")


def canonical(requirement):
    """The name of a requirement, as the index spells it."""
    found = NAME.match(requirement)
    assert found
    return re.sub(r"[-_.]+", "-", found.group()).lower()


def setup_lists():
    """Core requirements under '' and the extras of setup.py, read without running it."""
    lists = {}
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "install_requires":
            lists[""] = ast.literal_eval(node.value)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EXTRAS":
            lists |= ast.literal_eval(node.value)
    return lists


def pins():
    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    return {canonical(line): line for line in lines if line and not line.startswith("#")}


def test_the_core_is_few_and_light():
    core = {canonical(requirement) for requirement in setup_lists()[""]}
    assert core == {
        "torch", "numpy", "pydantic", "xxhash", "psutil", "msgpack", "cryptography", "safetensors", "llvmlite",
        "typer", "rich",
    }  # fmt: skip


def test_the_extras_are_those_that_the_documentation_names():
    assert set(setup_lists()) == {"", "megatron", "deepspeed", "hf", "bench", "report", "docs", "dev", "mutants"}


def test_the_indexs_apex_is_no_dependency_of_ours():
    everything = [canonical(requirement) for part in setup_lists().values() for requirement in part]
    assert "apex" not in everything and "nvidia-apex" not in everything and "apex" not in pins()


def test_whatever_is_required_is_pinned_exactly():
    found = pins()
    for requirement in {canonical(each) for part in setup_lists().values() for each in part}:
        assert re.match(r"[\w.-]+==[\w.]+(; python_version .*)?$", found.get(requirement, "")), requirement


def test_the_frameworks_are_pinned_to_the_versions_that_are_tested():
    found = pins()
    assert [found[name] for name in ("torch", "megatron-core", "deepspeed")] == [
        "torch==2.13.0",
        'megatron-core==0.16.1; python_version < "3.12"',  # its wheels from 0.17 on want 3.12
        "deepspeed==0.19.8",
    ]
    assert 'megatron-core==0.19.2; python_version >= "3.12"' in (ROOT / "launch" / "constraints.txt").read_text()


@pytest.mark.parametrize("minor", [10, 11, 12, 13])
def test_every_supported_python_has_one_pin_of_each_requirement(minor):
    from packaging.requirements import Requirement

    lines = (ROOT / "launch" / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    here = {"python_version": f"3.{minor}"}
    names = [canonical(one.name) for one in pinned if one.marker is None or one.marker.evaluate(here)]
    assert len(names) == len(set(names))
    required = [Requirement(each) for part in setup_lists().values() for each in part]
    wanted = {canonical(one.name) for one in required if one.marker is None or one.marker.evaluate(here)}
    assert wanted <= set(names)


def test_the_pythons_that_are_supported_are_said_alike():
    assert 'python_requires=">=3.10,<3.14"' in (ROOT / "setup.py").read_text()
    assert "(3, 10) <= sys.version_info[:2] <= (3, 13)" in (ROOT / "launch" / "setup.sh").read_text()
    assert "Python 3.10 to 3.13" in (ROOT / "README.md").read_text()


def test_patches_is_a_relative_link_to_the_folder_at_the_top():
    link = ROOT / "ft_plugins" / "patches"
    assert os.readlink(link) == "../patches"
    assert (link / "__init__.py").samefile(ROOT / "patches" / "__init__.py")


def test_no_file_names_a_package_index():
    host = re.compile(r"https?://[^\s\"')]*(pypi|pytorch|index|simple|mirror)", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    assert len(tracked) > 20
    assert not [path for path in tracked if host.search(path.read_text(errors="replace"))]


# ------------------------------------------------------------------------------------------------ launch/setup.sh

STUB = """#!/usr/bin/env bash
# A Python that records what is asked of it and makes a .venv with itself inside.
echo "$*" >>"$CALLS"
case "$*" in
    *"pip config list"*) printf '%s' "$PIP_SETTINGS" ;;
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; echo "version = 3.11.7" >.venv/pyvenv.cfg ;;
    *"pip install"*) echo "INSTALL $*" >&2; exit "${INSTALL_STATUS:-0}" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """The files that the setup reads, beside a stub of Python that installs nothing."""
    for name in ("setup.py", "launch/setup.sh", "launch/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    stub = tmp_path / "bin" / "python3.11"
    stub.parent.mkdir()
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def setup(project, status=0, **environ):
    """What the setup script says, on a machine whose only Python is the stub."""
    defaults = {"PATH": f"{project / 'bin'}:/usr/bin:/bin", "CALLS": str(project / "calls"), "PIP_SETTINGS": ""}
    done = subprocess.run(
        ["bash", "launch/setup.sh"],
        cwd=project,
        env=defaults | environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def has_gpu():
    return bool(list(Path("/dev").glob("nvidia[0-9]*"))) or any(
        (Path(folder) / "nvidia-smi").exists() for folder in ("/usr/bin", "/bin")
    )


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU: the CUDA packages are wanted")
def test_without_a_gpu_the_size_of_cuda_is_announced_before_anything_is_downloaded(project):
    said = setup(project)
    assert "gigabytes of CUDA packages" in said
    assert "FTP_TORCH_INDEX_URL" in said[: said.index("INSTALL")]


@pytest.mark.parametrize("key", ["index-url", "extra-index-url", "find-links"])
def test_where_pip_is_configured_nothing_is_announced(project, key):
    said = setup(project, PIP_SETTINGS=f"global.{key}='somewhere'\n")
    assert "CUDA" not in said and said.count("INSTALL") == 1


def test_torch_comes_from_the_index_that_the_variable_names(project):
    said = setup(project, FTP_TORCH_INDEX_URL="file:///wheels")
    first, second = [line for line in said.splitlines() if line.startswith("INSTALL")]
    assert "--index-url file:///wheels torch==2.13.0" in first and "CUDA" not in said
    assert "--constraint launch/constraints.txt --editable .[megatron,deepspeed,hf,dev,report]" in second


def test_a_second_setup_does_nothing(project):
    setup(project)
    calls = (project / "calls").read_text()
    assert setup(project) == ""
    assert (project / "calls").read_text() == calls


@pytest.mark.parametrize("name", ["setup.py", "launch/constraints.txt"])
def test_a_change_of_what_is_required_installs_again_into_the_same_environment(project, name):
    setup(project)
    with open(project / name, "a") as file:
        file.write("\n")
    assert "INSTALL" in setup(project)
    assert (project / "calls").read_text().count("-m venv") == 1


def test_an_installation_that_failed_is_tried_again(project):
    setup(project, status=1, INSTALL_STATUS="1")
    assert "INSTALL" in setup(project)


def test_without_a_suitable_python_it_says_which_are(project):
    for name in ("python3.10", "python3.11", "python3.12", "python3.13", "python3", "python"):
        (project / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
        (project / "bin" / name).chmod(0o755)
    assert "no Python from 3.10 to 3.13 with its venv module" in setup(project, status=1)
