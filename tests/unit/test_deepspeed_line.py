"""`import ft_plugins.deepspeed`: what it says of an error, and which end of a script it takes for an orderly one."""

import os
import subprocess
import sys

import pytest

BOUND = 240


def ran(folder, script, **environment):
    """`script` behind the one line, as a process."""
    (folder / "script.py").write_text(f"import sys\nimport ft_plugins.deepspeed\n{script}\n")
    told = {**os.environ, **environment}
    words = [sys.executable, "script.py"]
    return subprocess.run(words, cwd=folder, env=told, capture_output=True, text=True, timeout=BOUND, check=False)


@pytest.mark.parametrize("local_rank, lines", [(0, ["ft_plugins: one line"]), (1, [])])
def test_what_all_ranks_of_a_node_have_to_say_alike_is_said_once(tmp_path, local_rank, lines):
    place = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = ran(tmp_path, "from ft_plugins.errors import ConfigError\nraise ConfigError('one\\nline')", **place)
    assert done.returncode == 1 and done.stderr.splitlines() == lines
    done = ran(tmp_path, "from ft_plugins.errors import ResumeError\nraise ResumeError('of one rank')", **place)
    assert done.stderr == "ft_plugins: of one rank\n"
