"""What happens to a training whose processes are killed, hang or cannot work together: by torchrun, by --devices, and
by processes started one by one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minidl.distributed import group, started
from minidl.runtime import launch
from tests.distributed.conftest import SHORT
from tests.distributed.test_together import free_ports
from tests.distributed.test_workers import none_is_left
from tests.trials.kills import ALONE, command, ended

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo"),
]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
# One of two processes, which waits so long for the other.
CHILD = """
import sys, time, typer
from minidl import distributed
from minidl.cli.common import errors
from minidl.distributed import group
group._GRACE = 3.0
try:
    with errors():
        here = distributed.init(timeout=float(sys.argv[2]))
        here.gathered(1, "the first step")
        exec(sys.argv[1])
except typer.Exit as end:
    sys.exit(end.exit_code)
"""
HANGS = "if here.rank == 1: time.sleep(60)\nhere.gathered(1, 'the second step')"
CAPTURED = "with here.exchanging('a captured step'): time.sleep(60)"


def process_of(rank, out):
    """The number of the process of this rank that trains a run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(out).encode() in words and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:  # it has ended
            continue
    raise AssertionError(f"no process {rank} of {out}")


def after_an_epoch(begun, out):
    """The processes, once an epoch is saved."""
    end = time.monotonic() + 90
    while not (out / "checkpoints" / "last.json").exists():
        assert begun.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    return [process_of(rank, out) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("by", "victim", "more"),
    [
        (TORCHRUN, 1, ("--overwrite",)),
        (None, 0, ("--devices", "2")),
    ],
)
def test_one_that_is_killed_and_the_run_goes_on(tmp_path, expected, by, victim, more):
    """The command is the same when it is started again, and refuses no folder; what it replaces it replaces once."""
    out = tmp_path / "run"
    if "--overwrite" in more:
        shutil.copytree(expected, out)
        (out / "checkpoints" / "last.json").unlink()
    line = [*(by or [sys.executable]), "-m", "minidl", *command(out, *SHORT, *more)]
    begun = subprocess.Popen(line, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = after_an_epoch(begun, out)
    an_hour_ago = time.time() - 3600  # by the clock of another host
    os.utime(out / "config.json", (an_hour_ago, an_hour_ago))
    os.kill(processes[victim], signal.SIGKILL)
    _, said = begun.communicate(timeout=120)
    assert begun.returncode == 0, said
    if by is None:
        what = "was ended by SIGKILL; all are restarted from the last checkpoint"
        assert said == f"note: process {victim} {what}\n"
    assert (out / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    report = json.loads((out / "report.json").read_text())
    assert (report["processes"], report["shards"]) == (2, 4)
    assert report["examples_per_second"] > 0
    assert 0 < report["communication"] < 1
    text = (out / "report.txt").read_text()
    assert f", 2 processes\ndata parallel  4 shards; {report['examples_per_second']:,.1f} examples a second, " in text
    none_is_left(processes)


def test_a_run_of_another_command_is_refused_again_and_again(tmp_path, expected):
    """torchrun starts the command once more, and still the run in the folder is not its own."""
    shutil.copytree(expected, tmp_path / "run")
    before = (tmp_path / "run" / "config.json").read_bytes()
    line = [*TORCHRUN, "-m", "minidl", *command(tmp_path / "run", "--epochs", "1", "--quiet")]
    ran = subprocess.run(line, env=ALONE, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.count(f"error: --out {tmp_path / 'run'} exists and is not empty") == 2
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_command_in_error_is_not_started_again(tmp_path):
    line = [sys.executable, "-m", "minidl", *command(tmp_path / "run", "--devices", "2", "--lr", "1e30", "--quiet")]
    ran = subprocess.run(line, env=ALONE, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: training diverged")
    assert ran.stderr.count("\n") == 1, ran.stderr


def children(does, timeout):
    """(exit codes, what they said) of two processes, each of which takes part in one exchange and then does this."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": "2"}
    line = [sys.executable, "-c", CHILD, does, str(timeout)]
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return ended([subprocess.Popen(line, env={**ALONE, **place, "RANK": rank}, **piped) for rank in "01"])


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (HANGS, "process 0 in the second step; process 1 after the first step (the second step: Timed out waiting"),
        (CAPTURED, "process 0 in a captured step; process 1 in a captured step (a captured step: no end after 2 s)"),
    ],
)
def test_one_that_hangs_is_told_after_the_time_out(does, message):
    begun = time.monotonic()
    codes, said = children(does, 2)
    assert f"error: the processes wait for each other: {message}" in said
    assert said.count("error: ") == 1, said
    assert codes == [1, 1], said
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(("how", "ends"), [("waiting('a captured step')", 130), ("exchanging('a sum')", 0)])
def test_sigterm_ends_one_that_waits_in_a_recorded_step(how, ends):
    """Its main thread hears nothing there; torchrun would kill it after half a minute. A sum ends by itself."""
    line = (
        "import signal; from torch.distributed import HashStore; from minidl.distributed import group, rendezvous;"
        "signal.signal(signal.SIGTERM, lambda *_: None); group._PATIENCE = 1.0;"
        "here = group.Group(0, 1, rendezvous.Store(HashStore(), 1.0));"
        f"print('waits', flush=True); block = here.{how}; block.__enter__(); time.sleep(4); block.__exit__(*3 * [None])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"import time; {line}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "waits\n"
        time.sleep(0.5)
        child.send_signal(signal.SIGTERM)
        _, said = child.communicate(timeout=60)
    assert child.returncode == ends, said
    assert ("error: process 0: stopped while it waited in a captured step" in said) == (ends == 130)


def test_one_without_memory_ends_all():
    codes, said = children("if here.rank == 1: bytearray(2**62)\nhere.gathered(1, 'the second step')", 60)
    assert "error: process 1: this machine is out of memory: an allocation failed" in said
    assert said.count("error: ") == 1, said
    assert codes == [1, 1], said


@pytest.mark.parametrize("victim", [0, 1])
def test_the_flag_decides_how_long_one_waits(tmp_path, victim):
    """A process that is stopped says nothing of itself, and the first does not answer where they have met."""
    out = tmp_path / "run"
    line = [sys.executable, "-m", "minidl", *command(out, "--epochs", "1000", "--devices", "2", "--timeout", "6")]
    begun = subprocess.Popen(line, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = after_an_epoch(begun, out)
    os.kill(processes[victim], signal.SIGSTOP)
    stopped = time.monotonic()
    _, said = begun.communicate(timeout=60)
    assert time.monotonic() - stopped < 45
    assert begun.returncode == 1
    assert said.startswith(f"error: no answer from process {victim} of 2")
    assert said.count("\n") == 1, said
    none_is_left(processes)


def test_ctrl_c_says_that_all_is_saved_and_how_to_go_on(tmp_path):
    out = tmp_path / "run"
    line = [sys.executable, "-m", "minidl", *command(out, "--epochs", "1000", "--devices", "2", "--quiet")]
    begun = subprocess.Popen(line, env=ALONE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = after_an_epoch(begun, out)
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=60)
    assert begun.returncode == 130
    assert said.startswith("interrupted after epoch ")
    assert f"; everything is saved. To continue:\n  minidl train table --out {out} --resume --devices 2\n" in said, said
    none_is_left(processes)


def wrong(tmp_path, what):
    """(environment, folder) of the second process, which is another in one way."""
    if what == "data":
        text = Path("here.csv").read_text()
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "here.csv").write_text(text.replace("3.0", "3.5"))
        return {}, tmp_path / "there"
    if what == "environment":  # tile tables
        tiles = tmp_path / "tiles"
        tiles.mkdir()
        table = Path(launch.__file__).with_name("tiles") / "loss.json"
        (tiles / "loss.json").write_text(table.read_text() + "\n")
        return {"MINIDL_TILES": str(tiles)}, tmp_path
    shutil.copytree(Path(started.__file__).parents[1], tmp_path / "code" / "minidl")
    with (tmp_path / "code" / "minidl" / "version.py").open("a") as file:
        file.write("# another\n")
    return {"PYTHONPATH": str(tmp_path / "code")}, tmp_path


@pytest.mark.parametrize("what", ["data", "environment", "version"])
def test_processes_that_differ_have_one_error(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i % 7}.0,{i % 5}.0,{i % 3}.0\n" for i in range(60))
    Path("here.csv").write_text("a,b,y\n" + rows)
    other, folder = wrong(tmp_path, what)
    line = [sys.executable, "-m", "minidl", "train", "table", "--data", "here.csv", "--target", "y", "--no-plots"]
    line += ["--out", str(tmp_path / "run"), "--epochs", "1"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": "2"}
    piped = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    first = subprocess.Popen(line, env={**ALONE, **place, "RANK": "0"}, cwd=tmp_path, **piped)
    second = subprocess.Popen(line, env={**ALONE, **place, "RANK": "1", **other}, cwd=folder, **piped)
    codes, said = ended([first, second])
    assert f"error: process 1 has another {what} than process 0: start all processes with the same" in said
    assert said.count("\n") == 1, said
    assert codes[0] == codes[1] != 0


def test_a_port_in_use_is_one_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1]), "WORLD_SIZE": "2", "RANK": "0"}
        line = [sys.executable, "-m", "minidl", *command(tmp_path / "run", "--timeout", "5")]
        ran = subprocess.run(line, env={**ALONE, **place}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: the processes cannot meet at 127.0.0.1:{place['MASTER_PORT']}: ")
    assert "address already in use" in ran.stderr
    assert ran.stderr.count("\n") == 1, ran.stderr


def test_one_that_does_not_come_is_named(tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": "3"}
    line = [sys.executable, "-m", "minidl", *command(tmp_path / "run", "--timeout", "3")]
    ran = subprocess.run(line, env={**ALONE, **place, "RANK": "0"}, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith(f"error: the processes cannot meet at 127.0.0.1:{place['MASTER_PORT']}: ")
    assert ran.stderr.count("\n") == 1, ran.stderr


@pytest.mark.parametrize(
    ("count", "nccl", "message"),
    [(2, False, "this torch has no NCCL"), (2, True, "GPU 2 of this process does not exist: this host has 2")],
)
def test_gpus_that_cannot_be_used_are_told(monkeypatch, count, nccl, message):
    monkeypatch.setenv("LOCAL_RANK", "2" if nccl else "1")
    monkeypatch.setattr(group.torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: nccl)
    with pytest.raises(started.DistributedError, match=message):
        group._on_gpu()
