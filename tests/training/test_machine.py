"""Free memory: the least of what the machine, control groups and limits leave, from files as Linux writes them."""

import resource

import pytest

from minidl.training.process import memory_limit

GB, MB = 2**30, 2**20
V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.fixture
def linux(tmp_path, monkeypatch):
    """Writes files below a root, for a process without limits on a machine with 8 GiB available."""
    limits = {}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limits.get(which, resource.RLIM_INFINITY),) * 2)

    def write(files=None, given=None):
        every = {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable:   {8 * GB // 1024} kB\n", **(files or {})}
        for name, text in every.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
        limits.update(given or {})
        return memory_limit.free(tmp_path)

    return write


def group(folder, current, inactive=0, **limits):
    """The files of a control group of version 2."""
    files = {f"memory.{name}": f"{limit}\n" for name, limit in {"max": "max", "high": "max", **limits}.items()}
    files |= {"memory.current": current, "memory.stat": f"anon 5\ninactive_file {inactive}\nslab 7\n"}
    return {f"sys/fs/cgroup{folder}/{name}": text for name, text in files.items()}


def test_a_machine_without_limits(linux):
    assert linux() == 8 * GB


def test_a_system_that_tells_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memory_limit.free(tmp_path) is None


@pytest.mark.parametrize(
    ("limits", "current", "inactive", "free"),
    [
        ({}, GB, 0, 8 * GB),
        ({"max": 3 * GB}, GB, 0, 2 * GB),
        ({"max": 3 * GB, "high": 2 * GB}, GB, 0, GB),
        ({"max": 3 * GB}, GB, 512 * MB, 2 * GB + 512 * MB),
        ({"max": 3 * GB}, 4 * GB, 0, 0),
        ({"max": 100 * GB}, GB, 0, 8 * GB),
    ],
)
def test_a_control_group(linux, limits, current, inactive, free):
    about = {"proc/self/cgroup": "0::/a/job\n", "proc/self/mountinfo": CPU + V2.format(root="/")}
    assert linux({**about, **group("/a/job", current, inactive, **limits)}) == free


def test_every_group_above_counts_too(linux):
    about = {"proc/self/cgroup": "0::/a/b/job\n", "proc/self/mountinfo": V2.format(root="/")}
    inner = group("/a/b/job", GB, max=4 * GB)
    assert linux({**about, **inner, **group("/a", 5 * GB, max=6 * GB)}) == GB
    assert linux({**about, **inner, **group("/a", 5 * GB, max=6 * GB), **group("", 0, max=MB)}) == MB


@pytest.mark.parametrize("path", ["/", "/docker/1234", "/../job"])
def test_a_container_sees_its_group_as_the_root(linux, path):
    mounted = V2.format(root="/docker/1234" if "docker" in path else "/")
    about = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": mounted}
    assert linux({**about, **group("", GB, max=2 * GB)}) == GB


def test_groups_of_version_1(linux):
    about = {
        "proc/self/cgroup": "9:cpu:/x\n4:memory,blkio:/job\n0::/\n",
        "proc/self/mountinfo": CPU + V1.format(root="/"),
    }
    folder = "sys/fs/cgroup/memory/job/memory."
    files = {f"{folder}usage_in_bytes": 2 * GB, f"{folder}stat": f"inactive_file 1\ntotal_inactive_file {GB}\n"}
    assert linux({**about, **files, f"{folder}limit_in_bytes": 3 * GB}) == 2 * GB
    assert linux({**about, **files, f"{folder}limit_in_bytes": 2**63 - 4096}) == 8 * GB


@pytest.mark.parametrize(("which", "free"), [(resource.RLIMIT_AS, 2 * GB), (resource.RLIMIT_DATA, 3 * GB)])
def test_limits_of_the_process_less_what_is_mapped(linux, which, free):
    status = f"Name: python\nVmSize:\t{2 * GB // 1024} kB\nVmData:\t{GB // 1024} kB\n"
    assert linux({"proc/self/status": status}, {which: 4 * GB}) == free
    assert linux({"proc/self/status": status}, {which: GB // 2}) == 0


def test_this_machine():
    assert 0 < memory_limit.free() < 2**50
    assert 0 < memory_limit.data() < 2**50


def test_files_that_are_nonsense_limit_nothing(linux):
    about = {
        "proc/self/cgroup": "0::/job\nnonsense\n",
        "proc/self/mountinfo": "1 2\n\n - cgroup2\n" + V2.format(root="/"),
    }
    assert linux({**about, **group("/job", "nothing", max="many")}) == 8 * GB
