"""Memory that a control group does not allow is refused before it is claimed, with the file and its figures.

The kernel's files are written down here as versions 1 and 2 have them, whole machines and containers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_plugins.errors import BudgetError
from ft_plugins.snapshot import room
from ft_plugins.snapshot.room import check_room

MIB = 1 << 20


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for /sys/fs/cgroup; beside it `own`, for /proc/self/cgroup."""
    monkeypatch.setattr(room, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(room, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "fs"


def own(kernel: Path, text: str) -> None:
    (kernel.parent / "own").write_text(text)


def v2(group: Path, limit: str, current: int, files: int) -> None:
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{current}\n")
    half = files // 2
    (group / "memory.stat").write_text(f"anon 77\nactive_file {half}\ninactive_file {files - half}\nshmem 5\n")


def v1(group: Path, limit: int, usage: int, files: int) -> None:
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{usage}\n")
    own_lines = "active_file 1\ninactive_file 1\n"  # of this group alone
    (group / "memory.stat").write_text(f"{own_lines}total_active_file {files}\ntotal_inactive_file 0\n")


def refused(nbytes: int, file: Path, limit: int, used: int) -> None:
    with pytest.raises(BudgetError) as error:
        check_room(nbytes, "rank 3: protection")
    for part in ("rank 3: protection needs", str(nbytes), f"{file} allows {limit}", f"{used} are in use", "--memory"):
        assert part in str(error.value)
    check_room(limit - used, "what is left")


def test_a_limit_of_version_2_is_named_with_what_is_left_of_it(kernel: Path) -> None:
    own(kernel, "0::/job/step\n")
    v2(kernel / "job" / "step", str(4 * MIB), MIB, 0)
    refused(3 * MIB + 1, kernel / "job" / "step" / "memory.max", 4 * MIB, MIB)


def test_pages_of_files_are_given_back_by_the_kernel_and_do_not_count(kernel: Path) -> None:
    own(kernel, "0::/\n")
    v2(kernel, str(4 * MIB), 4 * MIB, 3 * MIB)
    refused(3 * MIB + 1, kernel / "memory.max", 4 * MIB, MIB)


def test_the_limit_of_a_group_around_counts_too(kernel: Path) -> None:
    own(kernel, "0::/slice/job\n")
    v2(kernel / "slice" / "job", "max", MIB, 0)
    (kernel / "slice" / "memory.max").write_text(str(2 * MIB))
    (kernel / "slice" / "memory.current").write_text(str(MIB))
    (kernel / "slice" / "memory.stat").write_text("active_file 0\ninactive_file 0\n")
    refused(MIB + 1, kernel / "slice" / "memory.max", 2 * MIB, MIB)


def test_a_limit_of_version_1_is_named_also_in_a_container_that_sees_the_path_of_its_host(kernel: Path) -> None:
    own(kernel, "9:name=systemd:/x\n4:cpuset,memory:/docker/0123abc\n3:cpu:/\n0::/\n")
    v1(kernel / "memory", 4 * MIB, 3 * MIB, MIB)
    refused(2 * MIB + 1, kernel / "memory" / "memory.limit_in_bytes", 4 * MIB, 2 * MIB)


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/\n", "4:memory:/job\n0::/job\n"])
def test_where_nothing_is_limited_the_mount_alone_counts(kernel: Path, text: str) -> None:
    own(kernel, text)
    v2(kernel / "job", "max", 1, 0)
    v1(kernel / "memory" / "job", 9223372036854771712, 1, 0)
    check_room(1, "little")
    with pytest.raises(BudgetError, match="needs 1125899906842624 bytes in /dev/shm, but only"):
        check_room(1 << 50, "much")


def test_a_machine_without_control_groups_has_no_such_limit(kernel: Path) -> None:
    check_room(1, "little")
