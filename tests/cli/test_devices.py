"""`--devices`: what several processes make is what one makes, byte for byte, whichever of them die."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
from scipy.sparse import csr_matrix

import minidl
from minidl.data import workers as workers_of_data
from minidl.data.records import Pictures
from minidl.data.workers import Message, Workers
from minidl.distributed import workers
from minidl.errors import ConfigError, DamagedError
from minidl.generation import generate, output, sharing
from minidl.generation.config import Generate
from minidl.models import dcgan
from minidl.training.loop import forward
from minidl.training.prediction import multi_gpu
from minidl.training.process.device import processes
from tests.cli.conftest import start, wait_for
from tests.cli.test_errors import refused


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    minidl.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    dcgan.save_generator(dcgan.Generator(latent=2, size=(8, 8), width=1).eval(), path, command="test", seed=1)
    return path


@pytest.fixture
def as_one_of(command, monkeypatch):
    """A command as torchrun starts it, in this process."""

    def run(rank, world, *arguments, run="first"):
        with monkeypatch.context() as changed:
            for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("MINIDL_RUN", run)):
                changed.setenv(name, str(value))
            return command(*arguments)

    return run


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Died(Exception):  # noqa: N818
    pass


def dies(*_):
    raise Died


def dies_at_the_end(call, *arguments, **more):
    """The first process dies when it has done its part."""
    with mock.patch.object(sharing.Part, "is_complete", dies), pytest.raises(Died):
        call(*arguments, **more)


FORMATS = {
    "png": ("--seeds", "0-1,9,7", "--grid", "2x4"),
    "jpg": ("--interpolate", 3, 9, "--steps", 4, "--grid", "1x4", "--format", "jpg"),
    "zip": ("--count", 4, "--format", "zip"),
    "npy": ("--count", 5, "--format", "npy", "--truncation", 1.5),
    "latents": ("--latents", "z.npy", "--format", "bmp"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_files_as_by_one_process_in_whatever_order_they_end(
    command, as_one_of, model, tmp_path, monkeypatch, kind
):
    monkeypatch.chdir(tmp_path)
    np.save("z.npy", np.arange(10.0).reshape(5, 2) / 10)
    given = ("generate", "--model", model, *FORMATS[kind], "--batch-size", 1, "--out")
    assert command(*given, "one").code == 0
    dies_at_the_end(as_one_of, 0, 3, *given, "three")  # the others then find its plan
    for rank in (2, 1):
        result = as_one_of(rank, 3, *given, "three")
        assert (result.code, result.out, result.err) == (0, "", "")
    made = []
    monkeypatch.setattr(sharing.Part, "log", lambda part, at, sums: made.append(at))
    result = as_one_of(0, 3, *given, "three")
    assert result.code == 0, result.err
    assert made == []
    assert contents(tmp_path / "three") == contents(tmp_path / "one")


@pytest.mark.parametrize("trial", range(3))
def test_the_same_command_makes_only_what_is_missing(command, as_one_of, model, tmp_path, monkeypatch, trial):
    """The first of two processes dies after some pictures, in the middle of writing one; one or three go on."""
    draw = random.Random(trial)
    given = ("generate", "--model", model, "--count", 4, "--grid", "2x2", "--batch-size", 1, "--out")
    assert command(*given, tmp_path / "one").code == 0
    before, real = draw.randint(0, 1), sharing.Part.log
    with monkeypatch.context() as changed:
        left = iter(range(before))
        changed.setattr(sharing.Part, "log", lambda *given: dies() if next(left, None) is None else real(*given))
        with pytest.raises(Died):
            as_one_of(0, 2, *given, tmp_path / "out")
    new = tmp_path / "out" / ".new-pictures"
    assert (new / f"seed-{before:06}.png").exists()
    (new / f"seed-{before:06}.png").write_bytes(b"half of it")
    with (new / "made-0.txt").open("a") as log:
        log.write("3 4")  # without its end
    seen = []
    monkeypatch.setattr(sharing.Part, "log", lambda part, at, sums: [seen.extend(at.tolist()), real(part, at, sums)])
    if trial == 1:
        dies_at_the_end(as_one_of, 0, 2, *given, tmp_path / "out", run="second")
        assert as_one_of(1, 2, *given, tmp_path / "out", run="second").code == 0
        assert as_one_of(0, 2, *given, tmp_path / "out", run="second").code == 0
    else:
        result = command(*given, tmp_path / "out")
        assert (f"{before} of 4 images already exist" in result.out) == (before > 0)
    assert sorted(seen) == list(range(before, 4))
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.fixture
def begun(command, as_one_of, model, tmp_path):
    """Makes the pictures of a command, and those of a first process of two, which dies: the command, and the folder of
    the new pictures."""

    def begin(*flags):
        given = ("generate", "--model", model, "--count", 4, "--batch-size", 1, *flags, "--out")
        assert command(*given, tmp_path / "one").code == 0
        dies_at_the_end(as_one_of, 0, 2, *given, tmp_path / "out")
        return (*given, tmp_path / "out"), tmp_path / "out" / ".new-pictures"

    return begin


@pytest.mark.parametrize("kind", ["png", "zip", "npy", "grid"])
def test_pictures_that_were_exchanged_are_made_again(command, begun, tmp_path, kind):
    """None is delivered under the seed of another."""
    given, new = begun(*{"png": (), "grid": ("--grid", "2x2")}.get(kind, ("--format", kind)))
    files = [new / f"seed-{i:06}.png" for i in (0, 1)]
    if kind != "npy":
        files[0].rename(new / "other")
        files[1].rename(files[0])
        (new / "other").rename(files[1])
    if kind in ("npy", "grid"):
        path = new / ("images.npy" if kind == "npy" else "grid.rows")
        raw, each = bytearray(path.read_bytes()), 256 if kind == "npy" else 64
        first = len(raw) - 4 * each
        raw[first : first + 2 * each] = raw[first + each : first + 2 * each] + raw[first : first + each]
        path.write_bytes(raw)
    result = command(*given)
    assert result.code == 0, result.err
    assert "there already" not in result.out
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("made-0.txt", b"\xff\xfe junk\n0 4 .\n3\n9999999999 %b\n7 %b\n-1 x y z\n" % (b"0" * 32, b"0" * 32)),
        ("plan.json", b"[1, 2"),
        ("plan.json", b"\xff" * 100),
        ("plan.json", {"world": 10**9}),
        ("plan.json", {"world": 0}),
        ("plan.json", {"count": 10**12}),
        ("plan.json", {"missing": [[0, 10**12]]}),
        ("plan.json", {"missing": [[2, 1, 0]]}),
        ("plan.json", {"about": 5}),
        ("plan.json", {"run": None}),
        ("images.npy", b"short"),
    ],
)
def test_what_is_left_and_makes_no_sense_is_not_used(command, begun, tmp_path, name, content):
    given, new = begun("--format", "npy")
    if isinstance(content, dict):
        content = json.dumps({**json.loads((new / name).read_text()), **content}).encode()
    (new / name).write_bytes(content)
    result = command(*given)
    assert result.code == 0, result.err
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_what_is_left_of_other_pictures_is_not_used(command, as_one_of, model, tmp_path, monkeypatch):
    given = ("generate", "--model", model, "--count", 2, "--out", tmp_path / "out")
    dies_at_the_end(as_one_of, 0, 2, *given)
    refused(as_one_of(1, 2, *given, "--truncation", 1), "process 1 would make other pictures than process 0: they", 1)
    assert command(*given, "--format", "bmp").code == 0
    assert sorted(contents(tmp_path / "out")) == ["images.json", "seed-000000.bmp", "seed-000001.bmp"]
    monkeypatch.setattr(sharing, "_SECONDS", 0)
    refused(as_one_of(1, 2, *given, run="other"), "process 0 has not begun in ", 1)


def children(process):
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, parent in map(str.split, found.splitlines()) if int(parent) == process.pid]


@pytest.mark.slow
def test_processes_that_are_killed(command, model, tmp_path):
    """One of three is replaced; the one that has started them is killed, and two make the rest."""
    given = ("generate", "--model", model, "--count", 24, "--batch-size", 1, "--out", tmp_path / "out", "--devices")
    begun = start(*given, 3, folder=tmp_path)
    log = tmp_path / "out" / ".new-pictures" / "made-1.txt"
    wait_for(lambda: log.exists() and log.stat().st_size, begun)
    os.kill(children(begun)[1], signal.SIGKILL)
    line = begun.stderr.readline()
    assert line.startswith("note: process 1 was ended by SIGKILL"), line
    begun.send_signal(signal.SIGINT)
    begun.wait(30)
    out, err = begun.communicate()
    assert begun.returncode == 130
    assert err.startswith("interrupted; ")
    assert " of 24 images are finished; the same command makes seeds " in err
    begun = start(*given, 2, folder=tmp_path)
    out, err = begun.communicate(timeout=200)
    assert (begun.returncode, err) == (0, "")
    assert " of 24 images already exist\n24 images of 8x8 in " in out
    assert command(*given[:-3], "--out", tmp_path / "one").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


def test_processes_of_torchrun(command, model, tmp_path):
    given = ("generate", "--model", str(model), "--count", "3", "--format", "npy", "--out")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "minidl"]
    subprocess.run([*torchrun, *given, tmp_path / "out"], check=True, capture_output=True, timeout=200)
    assert command(*given, tmp_path / "one").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--devices", 0), "--devices is '0', expected a number of devices from 1 on, all or auto"),
        (("--devices", "most"), "--devices is 'most', expected a number of devices"),
        (("--devices", 65), "--devices is 65, expected at most 64"),
        (("--devices", 2, "--profile"), "--profile and --trace work with a single process only"),
    ],
)
def test_what_cannot_be(command, tmp_path, flags, message):
    refused(command("generate", *flags, "--out", tmp_path / "out"), message)
    assert list(tmp_path.iterdir()) == []


def test_one_process_where_more_have_nothing_to_do(command, model, tmp_path):
    result = command("generate", "--model", model, "--count", 1, "--devices", 2, "--out", tmp_path / "a")
    assert result.out.startswith(
        "note: --devices 2: using one process, because only one picture was requested\n1 image of 8x8"
    )
    result = command("generate", "--model", model, "--count", 2, "--devices", "all", "--out", tmp_path / "b")
    alone = result.out.startswith("note: --devices all: using one process, because at most one GPU is available\n")
    assert alone == (processes("all", "auto") == 1)


def test_as_many_devices_as_there_are(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(workers, "gpus", lambda: 4)
    assert [processes(asked, "auto") for asked in (1, 3, "all", "auto")] == [1, 3, 4, 4]
    assert processes("all", "cpu") == 1
    with pytest.raises(ConfigError, match="--devices is 5, expected at most 4 GPUs"):
        processes(5, "cuda")


def test_auto_takes_as_many_as_the_work_pays_for():
    assert sharing.processes(1000, 0.01, 0.01, 5.0, 8) == 7  # 10 s alone, 6.4 s by seven, 6.25 s by eight
    assert sharing.processes(400, 0.01, 0.01, 5.0, 8) == 1  # 4 s alone
    assert sharing.processes(10**6, 0.01, 0.0, 5.0, 8) == 1  # the GPU is never waited for
    assert sharing.processes(10**6, 0.01, 0.001, 5.0, 8) == 2  # it is for a tenth: 9,505 s by two, 9,130 by eight
    assert sharing.processes(10**6, 0.01, 0.01, 5.0, 1) == 1


def test_auto_goes_on_by_several_processes(model, tmp_path, monkeypatch, capsys):
    """What one process has made before it has chosen is not made again."""
    config = Generate(model=str(model), count=4, batch_size=1, out=tmp_path / "out", devices="auto")
    monkeypatch.setattr(generate, "_MEASURED", 0.0)
    monkeypatch.setattr(sharing, "processes", lambda *_: 3)
    assert generate.generate(config, 8) == 3
    assert capsys.readouterr().out.startswith("--devices auto: 3 of 8: the rest takes one ")
    log = (tmp_path / "out" / ".new-pictures" / "made-0.txt").read_text().split()
    assert log[::2] in ([], ["0"], ["0", "1"])
    monkeypatch.setattr(sharing, "processes", lambda *_: 1)
    assert generate.generate(config, 8) == 1
    assert len(json.loads((tmp_path / "out" / "images.json").read_text())["files"]) == 4


def test_rows_of_a_file_lie_at_their_places(tmp_path):
    for count, head in itertools.product((1, 7), (b"", b"head")):
        rows = output.RowFile(tmp_path / "rows", head, 12, count)
        rows.create()
        whole = np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)
        order = np.random.default_rng(0).permutation(count)
        for at in (np.sort(order[:3]), np.sort(order[3:])):
            rows.write(at, whole[at])
        assert rows.path.read_bytes() == head + whole.tobytes()


@pytest.fixture
def small_batches(monkeypatch):
    """Batches of 8, here and in the processes that are started; a part of outputs has three."""
    start = workers_of_data._START.replace("main()", "forward.BATCH, forward._PART_VALUES = 8, 60; main()")
    monkeypatch.setattr(workers_of_data, "_START", f"import minidl.training.loop.forward as forward; {start}")
    monkeypatch.setattr(forward, "BATCH", 8)
    monkeypatch.setattr(forward, "_PART_VALUES", 60)


def test_answers_and_scores_of_several_processes(command, text_run, texts, tmp_path, small_batches, monkeypatch):
    """The run has 3 labels, and the file 240 rows: the processes get the same batches as one, and parts in order."""
    run, asked = text_run[0], []
    real = multi_gpu.Spread.outputs
    monkeypatch.setattr(multi_gpu.Spread, "outputs", lambda *given: asked.append(given) or real(*given))
    for name, flags in (("predict", ("--file", texts)), ("evaluate", ("--data", texts))):
        one, two = (command(name, run, *flags, "--devices", count) for count in (1, 2))
        assert (two.code, two.err) == (0, one.err)
        assert two.out == one.out
    assert len(asked) == 2
    refused(
        command("predict", run, "a text", "--devices", "auto"),
        "--devices is 'auto', expected a number of devices from 1 on, or all",
    )
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(command("evaluate", run), "this command starts its processes itself: give --devices, without torchrun")


def test_what_a_process_is_asked_comes_as_it_was():
    draw = np.random.default_rng(0)
    pictures = Pictures(draw.integers(0, 256, (5, 4, 3, 1), dtype=np.uint8), (0.5,), (0.25,))
    table = draw.standard_normal((5, 3)).astype(np.float32)
    for features in (pictures, table, csr_matrix(table * (table > 0))):
        asked = multi_gpu._packed(features, 1, 4, {"width": 2})
        found = multi_gpu._unpacked(asked._replace(buffers=[bytes(buffer) for buffer in asked.buffers]))
        if isinstance(found, Pictures):
            assert (found.mean, found.std) == (pictures.mean, pictures.std)
            assert (found.pixels == pictures.pixels[1:4]).all()
        else:
            assert type(found) is type(features)
            assert (found != features[1:4]).sum() == 0


def test_a_process_that_finds_another_run_is_told(text_run):
    asked = Message({"run": str(text_run[0]), "identity": "0", "device": "auto"})
    with Workers(2) as processes, pytest.raises(DamagedError, match="was replaced by another run while it was read"):
        processes.submit(multi_gpu.load_model, asked)()
