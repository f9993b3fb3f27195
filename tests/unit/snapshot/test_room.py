"""Memory that a control group, the machine or the mount does not have is refused before it is claimed, with figures.

The kernel's files are written down here as versions 1 and 2 have them, whole machines and containers.
"""

import ctypes
import mmap
import os
import re

import pytest

from ft_plugins.errors import BudgetError
from ft_plugins.snapshot.segment import paths
from ft_plugins.snapshot.segment.paths import check_room, sizes_text

MIB = 1 << 20


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """What stands for /sys/fs/cgroup; beside it `own`, for /proc/self/cgroup."""
    monkeypatch.setattr(paths, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(paths, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(paths, "MEMINFO", tmp_path / "meminfo")
    return tmp_path / "fs"


def own(kernel, text):
    (kernel.parent / "own").write_text(text)


def v2(group, limit, current, files):
    group.mkdir(parents=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{current}\n")
    half = files // 2
    (group / "memory.stat").write_text(f"anon 77\nactive_file {half}\ninactive_file {files - half}\nshmem 5\n")


def v1(group, limit, usage, files):
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{usage}\n")
    own_lines = "active_file 1\ninactive_file 1\n"  # of this group alone
    (group / "memory.stat").write_text(f"{own_lines}total_active_file {files}\ntotal_inactive_file 0\n")


def refused(nbytes, file, limit, used):
    with pytest.raises(BudgetError) as error:
        check_room(nbytes, "rank 3: protection", smaller="--reft-redundancy none")
    message = str(error.value)
    assert re.match(r"rank 3: protection needs [\d.]+ MiB of host memory, but the control group of ", message)
    figures = [float(text) for text in re.findall(r"([\d.]+) MiB", message)]
    assert figures == pytest.approx([nbytes / MIB, (limit - used) / MIB, limit / MIB], abs=1e-6)
    assert figures[0] > figures[1], "the figures differ"
    assert f"group of {file} has only" in message and "docker: --memory" in message
    assert message.endswith("'ft-plugins sweep'; or claim less: --reft-redundancy none")
    check_room(limit - used, "what is left")


def test_who_holds_memory_of_files_that_were_removed_is_named(tmp_path):
    file = tmp_path / "ftp-big@n@0-r0"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 4096, prot=mmap.PROT_READ):
        for removed in (False, True):
            if removed:
                file.unlink()
            with pytest.raises(BudgetError) as error:
                check_room(1 << 60, "rank 3", tmp_path)
            holder = f"of job big were removed, and their memory is held by the process with pid {os.getpid()}; "
            assert (holder in str(error.value) and "'ft-plugins end big'" in str(error.value)) == removed


def test_a_limit_of_version_2_is_named_with_what_is_left_of_it(kernel):
    own(kernel, "0::/job/step\n")
    v2(kernel / "job" / "step", str(4 * MIB), MIB, 0)
    refused(3 * MIB + 1, kernel / "job" / "step" / "memory.max", 4 * MIB, MIB)


def test_pages_of_files_are_given_back_by_the_kernel_and_do_not_count(kernel):
    own(kernel, "0::/\n")
    v2(kernel, str(4 * MIB), 4 * MIB, 3 * MIB)
    refused(3 * MIB + 1, kernel / "memory.max", 4 * MIB, MIB)


def test_the_limit_of_a_group_around_counts_too(kernel):
    own(kernel, "0::/slice/job\n")
    v2(kernel / "slice" / "job", "max", MIB, 0)
    (kernel / "slice" / "memory.max").write_text(str(2 * MIB))
    (kernel / "slice" / "memory.current").write_text(str(MIB))
    (kernel / "slice" / "memory.stat").write_text("active_file 0\ninactive_file 0\n")
    refused(MIB + 1, kernel / "slice" / "memory.max", 2 * MIB, MIB)


def test_a_limit_of_version_1_is_named_also_in_a_container_that_sees_the_path_of_its_host(kernel):
    own(kernel, "9:name=systemd:/x\n4:cpuset,memory:/docker/0123abc\n3:cpu:/\n0::/\n")
    v1(kernel / "memory", 4 * MIB, 3 * MIB, MIB)
    refused(2 * MIB + 1, kernel / "memory" / "memory.limit_in_bytes", 4 * MIB, 2 * MIB)


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/\n", "4:memory:/job\n0::/job\n"])
def test_where_nothing_is_limited_the_mount_alone_counts(kernel, text):
    own(kernel, text)
    v2(kernel / "job", "max", 1, 0)
    v1(kernel / "memory" / "job", 9223372036854771712, 1, 0)
    check_room(1, "little")
    with pytest.raises(BudgetError, match="much needs 1048576.0 GiB of host memory, but /dev/shm has only"):
        check_room(1 << 50, "much")


def test_a_machine_without_control_groups_has_no_such_limit(kernel):
    check_room(1, "little")


# ------------------------------------------------------------------------------------------------ the machine


def meminfo(kernel, total, available):
    sizes = f"MemTotal:       {total >> 10} kB\nMemFree:        3 kB\nMemAvailable:   {available >> 10} kB\n"
    (kernel.parent / "meminfo").write_text(sizes + "HugePages_Total: 0\n")


def test_what_the_machine_has_left_is_the_limit_even_if_the_mount_is_larger(kernel):
    """By default a tmpfs may take half of the memory, whoever uses the other half."""
    meminfo(kernel, 64 * MIB, 8 * MIB)
    check_room(8 * MIB, "all of it")
    said = "more needs 8.000001 MiB of host memory, but this machine has only 8.000000 MiB free, of 64.000000 MiB: "
    with pytest.raises(BudgetError, match=re.escape(said) + "end other processes, or use more nodes"):
        check_room(8 * MIB + 1, "more")


@pytest.mark.parametrize(
    "text", ["", "MemTotal: 5 kB\n", "MemTotal: 5 kB\nMemAvailable: none\n", "MemTotal:\nMemAvailable:\n"]
)
def test_a_kernel_that_does_not_say_what_is_available_sets_no_limit(kernel, text):
    (kernel.parent / "meminfo").write_text(text)
    check_room(1, "little")


def test_this_machine_says_what_it_has():
    limits = {limit.where: limit for limit in paths.memory_limits()}
    assert 0 < limits["this machine"].free <= limits["this machine"].nbytes < 1 << 50
    assert 0 < limits["/dev/shm"].free <= limits["/dev/shm"].nbytes


def test_what_must_be_left_for_others_is_left_of_the_machine_and_of_each_control_group(kernel):
    """Of the mount nothing must be left: it may be as small as the claims that it is for."""
    meminfo(kernel, 64 * MIB, 8 * MIB)
    check_room(6 * MIB, "a slot", spare=2 * MIB)
    with pytest.raises(BudgetError, match=re.escape("a slot needs 9.0 MiB of host memory, but this machine has only")):
        check_room(6 * MIB, "a slot", spare=3 * MIB)
    own(kernel, "0::/job\n")
    v2(kernel / "job", str(8 * MIB), MIB, 0)
    check_room(6 * MIB, "a slot", spare=MIB)
    with pytest.raises(BudgetError, match="the control group"):
        check_room(6 * MIB, "a slot", spare=2 * MIB)


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((119 << 30, 32 << 30, 64 << 30), ("119.0 GiB", "32.0 GiB", "64.0 GiB")),
        ((3 << 30, (3 << 30) - (1 << 22), 64 << 30), ("3.000 GiB", "2.996 GiB", "64.000 GiB")),
        ((5 << 20, 0, 0), ("5.0 MiB", "0.0 MiB", "0.0 MiB")),
        ((7 << 30, 7 << 30), ("7.0 GiB", "7.0 GiB")),
    ],
)
def test_sizes_are_told_apart(sizes, texts):
    assert sizes_text(*sizes) == texts


def test_a_real_mount_is_measured_with_what_others_have_taken_of_it(kernel, tmp_path):
    libc, mount = ctypes.CDLL(None, use_errno=True), tmp_path / "mount"
    mount.mkdir()
    if libc.mount(b"tmpfs", bytes(mount), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"no tmpfs can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        (mount / "other").write_bytes(bytes(3 * MIB))
        check_room(5 * MIB, "the rest", mount)
        said = (
            f"8 ranks needs 6.0 MiB of host memory, but {mount} has only 5.0 MiB free, of 8.0 MiB: enlarge that mount"
        )
        with pytest.raises(BudgetError, match=re.escape(said)):
            check_room(6 * MIB, "8 ranks", mount)
        check_room(5 * MIB, "what a mount has is for claims alone", mount, spare=MIB)
    finally:
        assert libc.umount(bytes(mount)) == 0
