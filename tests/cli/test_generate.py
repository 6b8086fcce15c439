"""`generate`, and `evaluate` of a generator: tiny networks whose pictures show nothing."""

import errno
import hashlib
import itertools
import json
import os
import shutil

import numpy as np
import pytest
from PIL import Image

import minidl
from minidl.common import write_files
from minidl.data import Images
from minidl.generation import evaluator, export, latents, passes
from minidl.generation.built_in import FOLDER
from minidl.generation.evaluate import Reference, as_text, reference_rows
from minidl.generation.model import load
from minidl.models import dcgan
from minidl.training.run_folder import folder_lock
from tests.cli.test_errors import refused
from tests.cli.test_images import stripes


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A generator of 8x8 pictures, as it comes."""
    minidl.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    dcgan.save_generator(dcgan.Generator(latent=6, size=(8, 8), width=4).eval(), path, command="test", seed=1)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder of 2 class folders with 20 pictures of 8x8 each."""
    folder = tmp_path_factory.mktemp("data") / "pictures"
    for kind in ("across", "down"):
        (folder / kind).mkdir(parents=True)
        for i in range(60):
            Image.fromarray(stripes(kind, i, 8)).save(folder / kind / f"{i:03}.png")
    return folder


@pytest.fixture(scope="session")
def gan_run(command, pictures):
    """A finished GAN run on `pictures`."""
    folder = pictures.parent / "gan"
    result = command(
        "train", "gan", "--data", pictures, "--out", folder, "--epochs", 1, "--width", 4, "--latent", 6,
        "--batch-size", 64, "--no-plots",
    )  # fmt: skip
    assert result.code == 0, result.err
    return folder


@pytest.fixture(scope="session")
def judge_run(command, pictures):
    """A finished classifier of `pictures`."""
    folder = pictures.parent / "judge"
    result = command("train", "images", "--data", pictures, "--out", folder, "--epochs", 2, "--no-plots")
    assert result.code == 0, result.err
    return folder


def test_pictures_have_their_seed_and_model_in_them(minidl, model, tmp_path):
    out = tmp_path / "out"
    result = minidl(
        "generate", "--model", model, "--seeds", "0-2,100", "--grid", "2x2", "--truncation", 1.5, "--out", out
    )
    assert result.code == 0, result.err
    assert result.out.startswith("4 images of 8x8 in ")
    names = ["grid.png", "images.json", *(f"seed-{seed:06}.png" for seed in (0, 1, 2, 100))]
    assert sorted(path.name for path in out.iterdir()) == names
    sha256 = load(str(model)).sha256
    with Image.open(out / "seed-000100.png") as image:
        assert image.size == (8, 8)
        assert image.text["seed"] == "100"
        assert image.text["model_sha256"] == sha256
        assert image.text["truncation"] == "1.5"
    with Image.open(out / "grid.png") as image:
        assert image.text["seeds"] == "0-2,100"
    manifest = json.loads((out / "images.json").read_text())
    assert manifest["model_sha256"] == sha256
    sha256 = hashlib.sha256((out / "seed-000100.png").read_bytes()).hexdigest()
    assert manifest["files"][3] == {"file": "seed-000100.png", "seed": 100, "sha256": sha256}


def test_pictures_are_those_of_their_latents(command, model, tmp_path):
    z = latents.from_seeds([5, 9], 6)
    np.save(tmp_path / "z.npy", z)
    (tmp_path / "z.txt").write_text("\n".join(" ".join(map(repr, row)) for row in z.tolist()))
    found = []
    for name, flags in (
        ("seeds", ("--seeds", "5,9")),
        ("npy", ("--latents", tmp_path / "z.npy", "--batch-size", 1)),
        ("txt", ("--latents", tmp_path / "z.txt")),
        ("walk", ("--interpolate", 5, 9, "--steps", 2)),
    ):
        result = command("generate", "--model", model, *flags, "--format", "npy", "--quiet", "--out", tmp_path / name)
        assert (result.code, result.out) == (0, ""), result.err
        found.append(np.load(tmp_path / name / "images.npy"))
    assert found[0].shape == (2, 1, 8, 8)
    assert found[0].dtype == np.float32
    assert all((other == found[0]).all() for other in found[1:])
    half = command(
        "generate",
        "--model",
        model,
        "--seeds",
        "5,9",
        "--format",
        "npy",
        "--precision",
        "float16",
        "--out",
        tmp_path / "h",
    )
    assert half.code == 0, half.err
    assert np.load(tmp_path / "h" / "images.npy").dtype == np.float16
    assert np.abs(np.load(tmp_path / "h" / "images.npy") - found[0]).max() < 0.01


@pytest.mark.parametrize(
    ("few", "many", "shared"),
    [
        (("--seeds", 3), ("--seeds", "2-4,1234567"), "seed-000003.bmp"),
        (("--seeds", 1234567), ("--seeds", f"3,1234567,{2**63 - 1}"), "seed-1234567.bmp"),
        (("--interpolate", 5, 9, "--steps", 2), ("--interpolate", 5, 9, "--steps", 12), "step-000000.bmp"),
        (("--latents", 1), ("--latents", 12), "latent-000000.bmp"),
    ],
)
def test_a_name_does_not_depend_on_the_other_pictures(command, model, tmp_path, few, many, shared):
    contents = []
    for flags in (few, many):
        out = tmp_path / str(len(contents))
        if flags[0] == "--latents":
            np.save(tmp_path / "z.npy", latents.from_seeds(range(flags[1]), 6))
            flags = ("--latents", tmp_path / "z.npy")
        result = command("generate", "--model", model, *flags, "--format", "bmp", "--quiet", "--out", out)
        assert result.code == 0, result.err
        contents.append((out / shared).read_bytes())
        named = [entry["file"] for entry in json.loads((out / "images.json").read_text())["files"]]
        assert sorted(path.name for path in out.iterdir()) == sorted(["images.json", *named])
    assert contents[0] == contents[1]


def test_only_its_own_pictures_are_overwritten(command, model, tmp_path):
    out = tmp_path / "out"
    flags = ("generate", "--model", model, "--format", "bmp", "--quiet", "--out", out)
    assert command(*flags, "--count", 3).code == 0
    assert (out / "seed-000002.bmp").exists()
    refused(command(*flags, "--count", 2), "exists and is not empty")
    (out / "mine.txt").write_text("kept")
    assert command(*flags, "--count", 2, "--overwrite").code == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "images.json",
        "mine.txt",
        "seed-000000.bmp",
        "seed-000001.bmp",
    ]
    other = tmp_path / "other"
    other.mkdir()
    (other / "seed-0.bmp").write_text("mine")
    refused(command(*flags[:-1], other, "--count", 2, "--overwrite"), "has no intact images.json")
    assert (other / "seed-0.bmp").read_text() == "mine"


@pytest.mark.parametrize("name", ["..", ".", "", "mine.txt", "a\0b", "a" * 300, "\ud800", "seed-1.png/../mine.txt"])
def test_a_manifest_names_no_file_of_another_kind(command, model, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    (out / "seed-1.png").write_text("made")
    sha256 = hashlib.sha256(b"made").hexdigest()
    manifest = {"format": "minidl-images", "files": [{"file": name}, {"file": "seed-1.png", "sha256": sha256}]}
    (out / "images.json").write_text(json.dumps(manifest))
    result = command("generate", "--model", model, "--count", 1, "--quiet", "--overwrite", "--out", out)
    assert result.code == 0, result.err
    assert sorted(path.name for path in out.iterdir()) == ["images.json", "mine.txt", "seed-000000.png"]


def test_a_manifest_names_no_file_elsewhere(command, model, tmp_path):
    out, outside = tmp_path / "out", tmp_path / "outside.png"
    outside.write_text("mine")
    out.mkdir()
    manifest = {"format": "minidl-images", "files": [{"file": "../outside.png"}, {"file": str(outside)}, 3, None]}
    (out / "images.json").write_text(json.dumps(manifest))
    result = command("generate", "--model", model, "--count", 1, "--quiet", "--overwrite", "--out", out)
    assert result.code == 0, result.err
    assert outside.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seeds", "3-1"), "the range 3-1 ends before it begins"),
        (("--seeds", "x"), "'x' is not a seed"),
        (("--grid", "8"), "expected rows and columns"),
        (("--latents", "none.txt"), "none.txt cannot be read: No such file"),
        (("--model", "fashion"), "--model fashion is neither mnist nor a run"),
        (("--model", "none.safetensors"), "none.safetensors is gone"),
        (("--truncation", "0"), "--truncation is 0"),
        (("--count", "2.5"), "--count is 2.5, expected a whole number from 1 to 10000000"),
        (("--format", "gif"), "expected one of png, jpg, webp, bmp, npy, zip"),
        (("--count", "5", "--grid", "2x2"), "has 4 cells, and 5 pictures"),
    ],
)
def test_bad_requests_are_told_and_leave_nothing(command, model, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    given = ("--model", model, *flags) if "--model" not in flags else flags
    refused(command("generate", *given, "--out", tmp_path / "out"), message)
    assert list(tmp_path.iterdir()) == []


def test_a_walk_with_one_end_is_told(minidl):
    for arguments, got in ((("--interpolate", 3, "--out", "q"), "3"), (("--out", "q", "--interpolate"), "none")):
        done = minidl("generate", *arguments)
        assert (done.code, done.out) == (2, "")
        words = " ".join(done.err.replace("│", " ").split())
        assert f"Invalid value for '--interpolate': expected two seeds from 0 to 2^63 - 1, got {got} " in words


def test_latents_of_another_length(command, model, tmp_path):
    np.save(tmp_path / "z.npy", np.zeros((4, 7)))
    result = command("generate", "--model", model, "--latents", tmp_path / "z.npy", "--out", tmp_path / "out")
    refused(result, "has shape [4, 7], expected 6 numbers for each picture (shape [N, 6])")
    np.save(tmp_path / "z.npy", np.zeros((5, 6)))
    result = command(
        "generate", "--model", model, "--latents", tmp_path / "z.npy", "--grid", "2x2", "--out", tmp_path / "out"
    )
    refused(result, "--grid 2x2 has 4 cells, and 5 pictures")


def test_models_that_are_none(command, model, tmp_path, text_run):
    out = ("--out", tmp_path / "out")
    refused(command("generate", "--model", text_run[0], *out), "is a text run, which cannot generate pictures")
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    refused(
        command("generate", "--model", tmp_path / "junk.safetensors", *out),
        "junk.safetensors is damaged: not a",
    )
    broken = dcgan.load_generator(model)
    broken.project.weight.data[0, 0] = float("nan")
    dcgan.save_generator(broken, tmp_path / "nan.safetensors")
    refused(command("generate", "--model", tmp_path / "nan.safetensors", *out), "has values that are not finite")
    broken = dcgan.load_generator(model)
    broken.norm.running_var.data[0] = -1.0
    dcgan.save_generator(broken, tmp_path / "below.safetensors")
    below = command("generate", "--model", tmp_path / "below.safetensors", *out)
    refused(below, "norm.running_var has negative values")
    refused(command("generate", "--model", model, "--out", model), "is a file: give the name of a folder")


def test_a_run_whose_weights_were_changed_generates_nothing(command, gan_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gan_run, run)
    content = bytearray((run / "model.safetensors").read_bytes())
    content[-3] ^= 0x40
    (run / "model.safetensors").write_bytes(content)
    result = command("generate", "--model", run, "--count", 1, "--out", tmp_path / "out")
    refused(result, "model.safetensors is damaged (it is not the file that training wrote")
    assert not (tmp_path / "out").exists()


def test_the_built_in_generator(command, tmp_path):
    assert (FOLDER / "mnist.safetensors").stat().st_size < 4 * 2**20
    assert command("generate", "--count", 2, "--out", tmp_path / "out", "--quiet").code == 0
    about = load("mnist")
    assert (about.channels, about.size) == (1, (28, 28))


def test_a_run_generates_and_is_evaluated(command, gan_run, judge_run, tmp_path):
    result = command("generate", "--model", gan_run, "--count", 2, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    result = command(
        "evaluate", gan_run, "--evaluator", judge_run, "--samples", 100, "--json", tmp_path / "scores.json"
    )
    assert result.code == 0, result.err
    report = json.loads((gan_run / "evaluation.json").read_text())
    assert report == json.loads((tmp_path / "scores.json").read_text())
    assert as_text(report) == result.out
    assert "recall  near copies  classes" in result.out
    assert list(report["scores"]) == ["generated", "real", "a class missing", "blurred", "ten images", "noise"]
    assert report["scores"]["real"]["frechet"] < report["scores"]["noise"]["frechet"]
    assert report["scores"]["a class missing"]["missing"] in (0, 1)
    assert sum(report["scores"]["generated"]["classes"]) == pytest.approx(1)
    assert 0 <= report["scores"]["generated"]["memorised"] <= 1
    assert (gan_run / "nearest.png").exists()


def test_evaluations_that_cannot_be(command, gan_run, judge_run, text_run, model, tmp_path):
    refused(command("evaluate", text_run[0], "--samples", 100), "--samples requires a generator")
    refused(command("evaluate", gan_run), "minidl has no evaluator for ")
    refused(command("evaluate", gan_run, "--evaluator", text_run[0]), "is not a run of `minidl train images")
    refused(
        command("evaluate", gan_run, "--evaluator", judge_run, "--samples", 3),
        "--samples is 3, expected a whole number from 100",
    )
    refused(command("evaluate", model), "does not say what it was trained on: give --data")
    refused(command("evaluate", gan_run, "--label-column", "x"), "are for text runs")


def test_few_pictures_to_compare_with_are_told(command, judge_run, tmp_path):
    data, run = tmp_path / "few", tmp_path / "gan"
    for kind in ("across", "down"):
        (data / kind).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(stripes(kind, i, 8)).save(data / kind / f"{i}.png")
    small = ("--epochs", 1, "--width", 1, "--latent", 1, "--no-plots")
    result = command("train", "gan", "--data", data, "--out", run, *small)
    assert result.code == 0, result.err
    message = "few has 2 test pictures, and the scores need 4 or more"
    refused(command("evaluate", run, "--evaluator", judge_run, "--samples", 100), message)


def test_rows_where_all_but_few_are_of_one_class(judge_run):
    judge = evaluator.from_run(judge_run)
    pixels = np.stack([stripes("down", i, 8)[:, :, None] for i in range(12)])
    real = Images(pixels, np.array([0] * 10 + [1] * 2))
    reference = Reference(real, real, judge.read(pixels)[0], np.arange(12.0), 2)
    assert reference_rows(real, judge, reference)["a class missing"]["missing"] == 1
    real = Images(pixels[:4], np.array([0, 0, 1, 1]))
    assert list(reference_rows(real, judge, reference)) == ["real", "blurred", "ten images", "noise"]


def test_the_built_in_generator_is_found_beside_a_folder_of_its_name(command, gan_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr("minidl.generation.evaluate.evaluate", lambda config: asked.append(config.model))
    monkeypatch.setattr("minidl.generation.evaluate.as_text", lambda _: "")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"")
    assert command("evaluate", "mnist").code == 0
    shutil.rmtree("mnist")
    shutil.copytree(gan_run, "mnist")
    assert command("evaluate", "mnist").code == 0
    assert asked == ["mnist", str(tmp_path / "mnist")]


def test_an_exported_evaluator_reads_as_the_run(judge_run, gan_run, tmp_path, pictures):
    export.export("evaluator", judge_run, tmp_path / "e.safetensors", "0123")
    from_file, from_run = evaluator.load(tmp_path / "e.safetensors"), evaluator.from_run(judge_run)
    assert from_file.about["commit"] == "0123"
    assert from_file.about["command"].startswith("minidl train images --data")
    assert float(from_file.about["accuracy"]) > 0.5
    pixels = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    (features, classes), (again, classes_again) = from_file.read(pixels), from_run.read(pixels)
    assert (features == again).all()
    assert (classes == classes_again).all()
    with pytest.raises(ValueError, match="pictures have shape"):
        from_file.read(pixels[:, :4])
    export.export("generator", gan_run, tmp_path / "g.safetensors", "0123")
    z = latents.from_seeds([1], 6)
    outputs = [load(str(path)).generator(minidl.as_tensor(z)).data for path in (gan_run, tmp_path / "g.safetensors")]
    assert (outputs[0] == outputs[1]).all()


def test_a_folder_in_which_a_killed_process_only_began_is_new(command, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / write_files.part("images.json")).write_text('{"format": "mini')
    assert command("generate", "--count", "1", "--out", folder, "--quiet").code == 0
    assert sorted(path.name for path in folder.iterdir()) == ["images.json", "seed-000000.png"]
    (tmp_path / "mine").mkdir()
    for name in (".notes.part", ".images.json.0123456789abcdef.part"):
        (folder / name).write_text("of the user")
    assert command("generate", "--count", "1", "--out", folder, "--quiet", "--overwrite").code == 0
    names = [".images.json.0123456789abcdef.part", ".notes.part", "images.json", "seed-000000.png"]
    assert sorted(path.name for path in folder.iterdir()) == names


@pytest.fixture
def pictures_before(command, model, tmp_path):
    """A folder with three pictures and a file of the user's, and the command that replaces them by two others."""
    out = tmp_path / "out"
    flags = ("generate", "--model", model, "--format", "bmp", "--quiet", "--out", out)
    assert command(*flags, "--count", 3).code == 0
    (out / "mine.txt").write_text("mine")
    return out, (*flags, "--seeds", "2-3", "--overwrite")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_replacement_that_fails_at_any_write_keeps_the_pictures(command, pictures_before, monkeypatch):
    """Each write in turn finds a full disk: the old pictures are there as they were, or the new ones."""
    out, again = pictures_before
    before, real = contents(out), {name: getattr(write_files, name) for name in ("atomic", "write_new")}
    for last in itertools.count():
        left = iter(range(last))
        for name, write in real.items():

            def full(path, *content, left=left, write=write):
                if next(left, None) is None:
                    raise OSError(errno.ENOSPC, "No space left on device", str(path))
                return write(path, *content)

            monkeypatch.setattr(write_files, name, full)
        result = command(*again)
        if result.code == 0:
            break
        refused(result, "No space left on device", 1)
        assert contents(out) == before
    assert last == 4
    assert {*contents(out)} == {"images.json", "mine.txt", "seed-000002.bmp", "seed-000003.bmp"}


def killed_at(monkeypatch, name, last):
    """A process that is killed at a change of that number: no handler of an exception changes anything after it."""
    left, real = iter(range(last)), getattr(os, name)
    dead = []

    def killed(path, *rest, **named):
        if dead or next(left, None) is None:
            dead.append(path)
            raise KeyboardInterrupt
        return real(path, *rest, **named)

    monkeypatch.setattr(os, name, killed)
    if name == "replace":
        unlink = os.unlink
        monkeypatch.setattr(os, "unlink", lambda path, **named: None if dead else unlink(path, **named))
    return dead


@pytest.mark.parametrize("name", ["replace", "unlink"])
@pytest.mark.parametrize("begun", ["first", "overwrite"])
def test_a_command_that_is_killed_at_any_change_is_finished_by_the_same(
    command, pictures_before, monkeypatch, name, begun
):
    """Also the first into a folder, whose images.json names only files that are there."""
    out, again = pictures_before
    if begun == "first":
        shutil.rmtree(out)
        again = again[:-1]
    else:
        shutil.copytree(out, out.with_name("before"))
    for last in itertools.count():
        with monkeypatch.context() as context:
            dead = killed_at(context, name, last)
            command(*again)
        if begun == "first" and (out / "images.json").exists():
            listed = {entry["file"] for entry in json.loads((out / "images.json").read_text())["files"]}
            assert listed <= {*contents(out)}
        if not dead:
            break
        result = command(*again)
        # Only the folder of new pictures is left of one that is stopped at its very end.
        assert result.code == 0 or (begun == "first" and "images.json" in contents(out)), result.err
        names = {"images.json", "seed-000002.bmp", "seed-000003.bmp", *(["mine.txt"] if begun != "first" else [])}
        assert {*contents(out)} == names
        assert result.code != 0 or not (out / ".new-pictures").exists()
        shutil.rmtree(out)
        if begun != "first":
            shutil.copytree(out.with_name("before"), out)
    assert last > (3 if name == "replace" else 0)


def test_a_picture_that_was_changed_is_the_users(command, pictures_before):
    out, again = pictures_before
    (out / "seed-000000.bmp").write_text("mine")
    assert command(*again).code == 0
    assert contents(out)["seed-000000.bmp"] == b"mine"
    (out / "seed-000002.bmp").write_text("mine")
    refused(command(*again), "has a seed-000002.bmp that is not the one that images.json lists")
    assert contents(out)["seed-000002.bmp"] == b"mine"


@pytest.mark.parametrize("overwrite", [True, False])
def test_new_pictures_are_not_made_through_a_link(command, pictures_before, tmp_path, overwrite):
    out, again = pictures_before
    other = tmp_path / "other"
    other.mkdir()
    for name in ("images.npy", "images.zip", "images.json", "plan.json", "made-0.txt", "seed-000002.bmp", "begun.json"):
        (other / name).write_text("mine")
    if not overwrite:
        shutil.rmtree(out)
        out.mkdir()
        again = again[:-1]
    (out / ".new-pictures").symlink_to(other)
    refused(command(*again), ".new-pictures was not written by minidl" if overwrite else "exists and is not empty")
    assert {*contents(other).values()} == {b"mine"}
    assert len(contents(other)) == 7


@pytest.mark.parametrize("place", ["out", ".new-pictures"])
def test_another_folder_that_takes_the_place_meanwhile_stays_as_it_is(
    command, pictures_before, tmp_path, monkeypatch, place
):
    out, again = pictures_before
    shutil.copytree(out, tmp_path / "other")
    before, real = contents(tmp_path / "other"), passes.images
    path = out if place == "out" else out / place

    def images(*given):
        parts = [part.copy() for part in real(*given)]
        path.rename(tmp_path / "moved")
        path.symlink_to(tmp_path / "other")
        yield from parts

    monkeypatch.setattr(passes, "images", images)
    refused(command(*again), "another folder, or a link, is in its place", 1)
    assert contents(tmp_path / "other") == before
    assert [path.name for path in (tmp_path / "other").iterdir() if path.is_dir()] == []


def test_a_picture_of_the_users_is_not_replaced(command, pictures_before):
    out, again = pictures_before
    (out / "seed-000003.bmp").write_text("mine")
    before = contents(out)
    refused(command(*again), "has a seed-000003.bmp that is not the one that images.json lists")
    assert contents(out) == before


def test_two_commands_write_into_one_folder_one_after_the_other(command, pictures_before):
    out, again = pictures_before
    before = contents(out)
    with folder_lock.lock(out):
        refused(command(*again), f"{out} is being written by process {os.getpid()} on")
    assert contents(out) == before
