"""The tests of pure modules notice nine of ten small changes of the module; the others are explained."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "mutants.py"
TESTED = next(
    ast.literal_eval(each.value)
    for each in ast.parse(SCRIPT.read_text()).body
    if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "MODULES"
)


def test_every_module_and_test_file_that_is_named_exists():
    for name, tests in TESTED.items():
        assert ROOT.joinpath("ft_plugins", *name.split(".")).with_suffix(".py").is_file(), name
        assert all((ROOT / "tests" / "unit" / each).is_file() for each in tests), tests


@pytest.mark.all_configurations
@pytest.mark.timeout(0)  # the script bounds each mutant by ten times what its tests take unchanged
@pytest.mark.parametrize("name", TESTED)
def test_small_changes_of_a_module_are_noticed_by_its_own_tests(name):
    pytest.importorskip("cosmic_ray", reason="pip install -e '.[mutants]'")
    ran = subprocess.run([sys.executable, SCRIPT, name], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
