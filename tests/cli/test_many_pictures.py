"""Many pictures of `generate`: every format, any number of workers, and what may happen on the way.

The generator is replaced by one that takes no time, so that there are many.
"""

import builtins
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import minidl
from minidl.data import workers
from minidl.generation import generate, output, passes, writing
from minidl.models import dcgan
from tests.cli.conftest import environment
from tests.cli.test_generate import contents, refused
from tests.data.test_workers import alive, children

COUNT, PART, SIDE = 300, 50, 16


def floats(start, count):
    """Pictures [n, 3, SIDE, SIDE]: waves that differ from picture to picture."""
    n, c, y, x = np.ogrid[start : start + count, :3, :SIDE, :SIDE]
    return np.sin(0.1 * n + c + 0.3 * y + 0.2 * x).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    minidl.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    dcgan.save_generator(dcgan.Generator(6, 3, (SIDE, SIDE), 2).eval(), path, command="test", seed=1)
    return path


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """How many parts were taken of the generator so far; workers are used even for few pictures."""
    taken = []

    def images(model, latents, *_):
        for start in range(0, len(latents), PART):
            taken.append(start)
            yield floats(start, min(PART, len(latents) - start))

    monkeypatch.setattr(passes, "images", images)
    monkeypatch.setattr(generate.latents, "from_seeds", lambda seeds, latent, _: np.zeros((len(seeds), latent)))
    monkeypatch.setattr(writing, "_MANY", 0)
    return taken


@pytest.fixture(autouse=True)
def _ended():
    """No process may be left behind."""
    yield
    assert not any(map(alive, children(os.getpid())))


@pytest.fixture(params=["new", "old"])
def place(request, command, model, tmp_path):
    """A folder for the pictures with its content, None where there is none, and the command that fills it."""
    out = tmp_path / "out"
    flags = ("generate", "--model", model, "--count", COUNT, "--workers", 2, "--quiet", "--out", out)
    if request.param == "new":
        return out, None, flags
    assert command(*flags, "--count", 3).code == 0
    (out / "mine.txt").write_text("mine")
    return out, contents(out), (*flags, "--overwrite")


def as_before(out, before):
    return not out.exists() if before is None else contents(out) == before and not (out / ".new-pictures").exists()


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "bmp", "zip", "npy"])
def test_files_are_the_same_whatever_number_of_workers_makes_them(command, model, tmp_path, kind):
    flags = ("generate", "--model", model, "--count", COUNT, "--format", kind, "--quiet")
    found = []
    for count in (1, 2, 3):
        out = tmp_path / str(count)
        result = command(*flags, "--workers", count, "--out", out)
        assert (result.code, result.out) == (0, ""), result.err
        found.append(contents(out))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == (2 if kind in ("zip", "npy") else COUNT + 1)
    listed = json.loads(found[0]["images.json"])["files"]
    assert {entry["file"] for entry in listed if "file" in entry} | {"images.json"} == set(found[0])
    assert [entry["seed"] for entry in listed if "seed" in entry] == list(range(COUNT))


def text_of(image):
    return image.text if image.format == "PNG" else json.loads(image.getexif()[0x010E])


@pytest.mark.parametrize(("kind", "mean"), [("png", 0.0), ("bmp", 0.0), ("zip", 0.0), ("jpg", 2.0), ("webp", 7.0)])
def test_pictures_come_back(command, model, tmp_path, kind, mean):
    out = tmp_path / "out"
    assert command("generate", "--model", model, "--count", COUNT, "--format", kind, "--quiet", "--out", out).code == 0
    made = contents(out)
    manifest = json.loads(made["images.json"])
    if kind == "zip":
        with zipfile.ZipFile(out / "images.zip") as archive:
            assert archive.testzip() is None
            assert {(info.compress_type, info.date_time[0]) for info in archive.infolist()} == {(0, 1980)}
            made = {name: archive.read(name) for name in archive.namelist()}
    entries = [entry for entry in manifest["files"] if "seed" in entry]
    expected = output.pixels(floats(0, COUNT)).astype(int)
    for entry, picture in zip(entries, expected, strict=True):
        with Image.open(io.BytesIO(made[entry.get("file") or entry["member"]])) as image:
            assert np.abs(np.asarray(image) - picture).mean() <= mean
            if kind != "bmp":
                assert text_of(image)["seed"] == str(entry["seed"])
                assert text_of(image)["model_sha256"] == manifest["model_sha256"]


def test_an_array_holds_the_floats(command, model, tmp_path):
    out = tmp_path / "out"
    assert command("generate", "--model", model, "--count", COUNT, "--format", "npy", "--out", out).code == 0
    assert (np.load(out / "images.npy") == floats(0, COUNT)).all()


def test_a_grid_that_the_format_does_not_hold_is_refused(command, tmp_path):
    result = command("generate", "--count", 2, "--format", "webp", "--grid", "1000x1000", "--out", tmp_path / "out")
    refused(result, "pictures of 28x28 has a side of 29,001 pixels, and a webp at most 16,383: give --format png or")
    assert not (tmp_path / "out").exists()


def test_a_pillow_without_webp_is_told(command, model, tmp_path, monkeypatch):
    monkeypatch.setattr("PIL.features.check", lambda _: False)
    flags = ("generate", "--model", model, "--out", tmp_path / "out", "--format")
    refused(command(*flags, "webp"), "the installed Pillow does not support WebP: install another Pillow, or give")
    assert command(*flags, "jpg", "--count", 1, "--quiet").code == 0


def test_few_pictures_start_no_process(command, model, tmp_path, monkeypatch):
    monkeypatch.undo()

    def never(*_, **__):
        raise AssertionError("a process is started")

    monkeypatch.setattr(workers.subprocess, "Popen", never)
    result = command("generate", "--model", model, "--count", 5, "--workers", 3, "--quiet", "--out", tmp_path / "out")
    assert result.code == 0


def in_workers(monkeypatch, *lines):
    """What each worker does before its first picture."""
    before, _, after = workers._START.partition("from ")
    monkeypatch.setattr(workers, "_START", "\n".join([before, *lines, f"from {after}"]))


def test_pictures_in_flight_are_limited(command, place, drawn, monkeypatch):
    """However slow the disk is, the generator waits for it; what a worker says of it is told."""
    out, before, flags = place
    del drawn[:]

    in_workers(
        monkeypatch,
        "import os, time",
        "def full(_):",
        "    time.sleep(0.5)",
        f"    raise OSError({errno.ENOSPC}, 'No space left on device')",
        "os.fsync = full",
    )
    message = f"--out {out} cannot be written: No space left on device"
    refused(command(*flags, "--count", 100 * PART), message, 1)
    assert len(drawn) < 10
    assert as_before(out, before)


@pytest.mark.parametrize("kind", ["png", "zip", "npy"])
def test_a_full_disk(command, place, monkeypatch, kind):
    """From some byte on."""
    out, before, flags = place
    real, real_at, left = open, os.pwrite, [40_000]

    def take(data):
        left[0] -= memoryview(data).nbytes
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Full(io.FileIO):
        def write(self, data):
            take(data)
            return super().write(data)

    def at(handle, data, place):
        take(data)
        return real_at(handle, data, place)

    def opened(path, mode="r", *rest, **named):
        is_new = "xb" in mode and ("images" in path or path.startswith("seed"))
        return Full(path, "x", opener=named["opener"]) if is_new else real(path, mode, *rest, **named)

    monkeypatch.setattr(builtins, "open", opened)
    monkeypatch.setattr(os, "pwrite", at)
    message = f"--out {out} cannot be written: No space left on device"
    refused(command(*flags, "--workers", 1, "--format", kind), message, 1)
    assert left[0] < 0
    assert as_before(out, before)


def strikes(monkeypatch, act):
    """`act` happens when the generator is asked for its third part."""

    def images(model, latents, *_):
        for start in range(0, len(latents), PART):
            if start == 2 * PART:
                act()
            yield floats(start, min(PART, len(latents) - start))

    monkeypatch.setattr(passes, "images", images)


def test_a_worker_that_is_killed(command, place, monkeypatch):
    out, before, flags = place
    strikes(monkeypatch, lambda: [os.kill(pid, signal.SIGKILL) for pid in children(os.getpid()) if alive(pid)])
    refused(command(*flags), "a worker process was ended by SIGKILL, as by the system where memory runs out; run", 1)
    assert as_before(out, before)


def test_a_worker_that_cannot_be_started(command, place, monkeypatch):
    out, before, flags = place

    def none(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(workers.subprocess, "Popen", none)
    message = "2 worker processes cannot be started: Resource temporarily unavailable; run the command again with fewer"
    refused(command(*flags), message, 1)
    monkeypatch.undo()
    assert as_before(out, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["made", "written", "changed"])
def test_a_signal(command, place, monkeypatch, number, moment):
    out, before, flags = place
    if moment == "made":
        strikes(monkeypatch, lambda: signal.raise_signal(number))
    elif moment == "written":
        in_workers(
            monkeypatch,
            "import os",
            "from minidl.common import write_files",
            "real = write_files.write_new",
            "def write(folder, contents):",
            "    if 'seed-000070.png' in contents:",
            f"        os.kill(os.getppid(), {number.value})",
            "    real(folder, contents)",
            "write_files.write_new = write",
        )
    else:
        real = os.replace

        def replace(source, target, **place):
            real(source, target, **place)
            if Path(target).name == "seed-000001.png":
                signal.raise_signal(number)

        monkeypatch.setattr(os, "replace", replace)
    result = command(*flags)
    assert (result.code, result.err) == (130, "interrupted\n")
    if moment != "changed":
        assert as_before(out, before)
    else:  # the next command finishes it first
        monkeypatch.undo()
        if before is None:
            assert command(*flags).code == 0
            assert len(contents(out)) == COUNT + 1
        assert command(*flags, "--count", 2, "--overwrite").code == 0
        names = {"images.json", "seed-000000.png", "seed-000001.png", *(["mine.txt"] if before else [])}
        assert set(contents(out)) == names


KILLED = """
import sys, time
from tests.cli import test_many_pictures as many
from minidl.cli import app
from minidl.generation import passes, writing

def images(model, latents, *_):
    for start in range(0, len(latents), many.PART):
        if start == 4 * many.PART:
            print("working", flush=True)
            time.sleep(60)
        yield many.floats(start, many.PART)

passes.images, writing._MANY = images, 0
app(sys.argv[1:])
"""


def test_a_command_that_is_killed(command, place, monkeypatch):
    """Its workers end with it; the old pictures are there, and the next command clears what it left."""
    out, before, flags = place
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root,
        env=environment(),
    )  # fmt: skip
    assert process.stdout.readline() == b"working\n"
    working = children(process.pid)
    assert len(working) == 2
    process.kill()
    assert process.communicate(timeout=20)[1] == b""
    deadline = time.monotonic() + 10
    while any(map(alive, working)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, working))
    assert (out / ".new-pictures").is_dir()
    assert contents(out) == (before or {})
    assert command(*flags).code == 0
    assert len(contents(out)) == COUNT + 1 + (before is not None)
    assert not (out / ".new-pictures").exists()


def test_a_folder_of_that_name_that_is_the_users_is_left_alone(command, model, tmp_path):
    (tmp_path / "out" / ".new-pictures").mkdir(parents=True)
    (tmp_path / "out" / ".new-pictures" / "mine.txt").write_text("mine")
    refused(command("generate", "--model", model, "--out", tmp_path / "out"), "exists and is not empty")
    assert (tmp_path / "out" / ".new-pictures" / "mine.txt").read_text() == "mine"
