"""`minidl sanitize` and the processes of a script: their bugs count, however they were started and however they end."""

import fcntl
import json

import pytest

from minidl.tools import sanitizing

KERNEL = """
import multiprocessing, os, signal, subprocess, sys
import torch, triton, triton.language as tl
from torch.utils.data import DataLoader, Dataset

@triton.jit
def copies(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)

def copy(n=12):
    copies[(2,)](torch.ones(10), torch.empty(10), n, BLOCK=8)

"""
STARTED = """
class Items(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, place):
        copy()
        return place

if __name__ == "__main__":
    if sys.argv[1:] == ["alone"]:
        copy()
        sys.exit()
    alone = subprocess.Popen([sys.executable, __file__, "alone"])
    kinds = "fork", "spawn", "forkserver"
    others = [multiprocessing.get_context(kind).Process(target=copy) for kind in kinds]
    for other in others:
        other.start()
    if (pid := os.fork()) == 0:
        copy()
        os._exit(0)
    os.waitpid(pid, 0)
    list(DataLoader(Items(), num_workers=2, batch_size=1))
    for other in others:
        other.join()
    alone.wait()
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "my_kernel.py").write_text(KERNEL + text)
        return tmp_path / "my_kernel.py"

    return write


@pytest.mark.slow
def test_bugs_of_every_process_count(minidl, script, tmp_path):
    done = minidl("sanitize", "--json", tmp_path / "found.json", script(STARTED), flags=())
    assert done.code == 1, done.err
    assert done.err.endswith("2 bugs in 7 launches of 1 kernel\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["launches"] == {"copies": 7}
    assert [(f["kind"], f["line"], f["accesses"]) for f in found["findings"]] == [
        ("out-of-bounds read", 9, 14),
        ("out-of-bounds write", 9, 14),
    ]


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("os._exit(0)", 1),
        ("os.execv('/bin/true', ['true'])", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    ],
)
def test_no_ending_loses_a_bug(minidl, script, ending, code):
    done = minidl("sanitize", script(f"copy()\n{ending}\n"))
    assert done.code == code
    assert "1. out-of-bounds read in copies, program (1, 0, 0)" in done.err
    assert "2 bugs in 1 launch of 1 kernel" in done.err


def test_a_python_that_is_not_checked_is_told(minidl, script):
    done = minidl(
        "sanitize",
        script(
            "copy(10)\n"
            "subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
            "subprocess.run([sys.executable, '-c', 'pass'], check=True, env={'A': 'b'})\n"
            "subprocess.run([sys.executable, '-I', '-c', 'pass'], check=True)\n"
            "os.waitpid(os.posix_spawn(sys.executable, ['python', '-c', 'pass'], {}), 0)\n"
            "subprocess.run(['true'], check=True, env={})\n"
        ),
    )
    assert done.code == 1
    *told, last = done.err.splitlines()
    assert len(told) == 3, done.err
    assert all(line.startswith("not checked: ") for line in told)
    assert all(line.endswith(": it was started without the environment of the script") for line in told)
    assert last == "no bugs in 1 launch of 1 kernel; not all processes were checked"


def test_processes_that_outlive_the_script_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(sanitizing, "_PATIENCE", 0.1)
    record = tmp_path / "record.jsonl"
    record.touch()
    assert sanitizing._wait_for_all(record)
    with record.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not sanitizing._wait_for_all(record)
