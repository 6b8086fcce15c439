"""`train images`, and `evaluate` and `predict` on its runs: tiny pictures of stripes, a folder per direction."""

import io
import json
import os
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from minidl.data import DataError
from minidl.errors import ConfigError, DamagedError
from minidl.training.loop import trainer
from minidl.training.prediction import predict
from minidl.training.settings.command import Evaluate, Predict
from tests.cli.conftest import edited, older, read_without_torch, report
from tests.cli.test_errors import refused

SMALL = ("--epochs", "4", "--batch-size", "16", "--no-plots")


def stripes(kind, seed, size=7):
    """Grey stripes with noise: "across", "down", or neither ("plain")."""
    draw = np.random.default_rng(seed)
    wave = np.where((np.arange(size) + seed) % 4 < 2, 200, 40)
    pixels = {"across": wave[:, None] + 0 * wave, "down": wave + 0 * wave[:, None], "plain": np.full((size, size), 120)}
    return np.clip(pixels[kind] + draw.normal(0, 20, (size, size)), 0, 255).astype(np.uint8)


def write_folder(folder, count, first=0):
    for kind in ("across", "down", "plain"):
        (folder / kind).mkdir(parents=True)
        for i in range(first, first + count):
            Image.fromarray(stripes(kind, i)).save(folder / kind / f"{i:03}.png")
    return folder


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """A folder of 3 class folders with 24 pictures of 7x7 each."""
    return write_folder(tmp_path_factory.mktemp("data") / "photos", 24)


@pytest.fixture(scope="session")
def image_run(minidl, photos):
    """A finished run on `photos`. Tests copy it before they change it."""
    folder = photos.parent / "run"
    result = minidl("train", "images", "--data", photos, "--out", folder, *SMALL[:-1])
    assert result.code == 0, result.err
    return folder, result.out


@pytest.fixture
def answers(monkeypatch):
    def ask(folder, *inputs, stdin=None, **options):
        out = io.StringIO()
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            predict.predict(Predict(run=folder, inputs=tuple(map(str, inputs)), **options), out)
        finally:
            ask.written = [json.loads(line) for line in out.getvalue().splitlines()]
        return ask.written

    return ask


def test_an_image_run_has_its_files(image_run):
    folder, _ = image_run
    expected = {
        "config.json", "environment.json", "manifest.json", "metrics.jsonl", "model.safetensors", "report.json",
        "report.txt", "report.html", "checkpoints", "labels.json", "pictures.json", "calibration.json",
    }  # fmt: skip
    if find_spec("matplotlib") is not None:
        expected |= {"loss.png", "scores.png", "confusion.png", "reliability.png", "mistakes.png"}
        with Image.open(folder / "mistakes.png") as picture:
            assert min(picture.size) > 100
    assert {path.name for path in folder.iterdir()} == expected


def test_an_image_report_says_what_was_learnt(image_run):
    folder, out = image_run
    content = report(folder)
    assert content["kind"] == "images"
    assert content["task"] == "classification"
    assert content["accuracy"] >= 0.8
    assert content["baseline"].keys() == {"majority", "linear", "linear_all"}
    assert content["baseline"]["majority"]["accuracy"] == pytest.approx(1 / 3, abs=0.1)
    assert content["source"]["sizes"] == {"train": 51, "validation": 6, "test": 15}
    assert content["source"]["augment"] == {"shift": 0, "flip": False}
    assert [entry["label"] for entry in content["per_class"]] == ["across", "down", "plain"]
    assert "logistic regression on the pixels" in out
    assert "15 test examples, grey pictures of 7 x 7 pixels, 3 classes" in out

    assert "steps skipped" not in out


@pytest.mark.parametrize(
    ("settings", "smaller"),
    [({"batch_size": 1}, ""), ({"batch_size": 2, "mixup": 1.0}, ""), ({"batch_size": 2}, " or a smaller --batch-size")],
)
def test_no_batch_is_advised_that_cannot_be(tmp_path, settings, smaller):
    from minidl.training.tasks.images import TrainImages, task

    advice = task._batch_size_advice(TrainImages(data="x", out=tmp_path, **settings))
    assert advice.startswith(smaller)
    assert bool(advice) == bool(smaller)


def test_batch_norm_statistics_are_saved(image_run):
    saved = load_file(image_run[0] / "model.safetensors")
    assert saved["features.1.num_batches_tracked"] > 0
    assert not np.array_equal(saved["features.1.running_var"], np.ones(32, dtype=np.float32))


def test_files_folders_and_standard_input_agree(answers, image_run, tmp_path):
    folder, _ = image_run
    new = write_folder(tmp_path / "new", 2, first=100)
    paths = sorted(new.glob("*/*.png"))
    by_file = answers(folder, *paths)
    assert [answer["file"] for answer in by_file] == [str(path) for path in paths]
    assert sum(answer["label"] == path.parent.name for answer, path in zip(by_file, paths, strict=True)) >= 4
    assert all(answer["top"][0]["probability"] == answer["probability"] for answer in by_file)
    assert answers(folder, *sorted(new.iterdir())) == by_file
    assert answers(folder, stdin="\n".join(map(str, paths)) + "\n\n") == by_file
    assert [len(answer["top"]) for answer in answers(folder, paths[0], top=1)] == [1]


def test_a_larger_colour_picture_is_brought_to_size(answers, image_run, tmp_path):
    path = tmp_path / "big.png"
    small = Image.fromarray(stripes("down", 200)).convert("RGB")
    small.resize((70, 70), Image.Resampling.NEAREST).save(path)
    assert answers(image_run[0], path)[0]["label"] == "down"


def test_pictures_are_decoded_before_torch_is_there(image_run, photos):
    folder = next(path for path in photos.iterdir() if path.is_dir())
    assert read_without_torch(image_run[0], inputs=[str(folder)]) == len(list(folder.iterdir()))


def test_a_folder_of_class_folders_is_answered(answers, image_run, photos, tmp_path):
    for name in ("b", "a", ".hidden"):
        (tmp_path / name).mkdir()
        for number in (2, 1):
            shutil.copy(photos / "down" / "001.png", tmp_path / name / f"{number}.png")
    files = [str(tmp_path / name) for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png")]
    assert [answer["file"] for answer in answers(image_run[0], tmp_path)] == files
    shutil.copy(photos / "down" / "001.png", tmp_path / "own.png")
    assert [answer["file"] for answer in answers(image_run[0], tmp_path)] == [str(tmp_path / "own.png")]


def test_answers_before_a_bad_file_are_written(answers, image_run, photos, tmp_path):
    good, bad = photos / "down" / "001.png", tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"bad\.png cannot be read as a picture"):
        answers(image_run[0], good, bad, good)
    assert [answer["file"] for answer in answers.written] == [str(good)]
    with pytest.raises(DataError, match=r"bad\.png cannot be read as a picture"):
        answers(image_run[0], *[good] * 260, bad, good)
    assert len(answers.written) == 260
    with pytest.raises(DataError, match=r"none\.png does not exist"):
        answers(image_run[0], tmp_path / "none.png")
    (tmp_path / "none" / "below").mkdir(parents=True)
    with pytest.raises(DataError, match="is a folder without pictures"):
        answers(image_run[0], tmp_path / "none")
    with pytest.raises(ConfigError, match="--file and --text-column are for text and table runs"):
        answers(image_run[0], file=good)
    with pytest.raises(ConfigError, match="an empty name was given"):
        answers(image_run[0], good, "")


def test_a_file_name_that_is_no_text(image_run, photos, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    try:
        shutil.copy(photos / "down" / "001.png", path)
    except OSError:
        pytest.skip("this file system takes names of UTF-8 only")
    out = io.StringIO()
    predict.predict(Predict(run=image_run[0], inputs=(str(path),)), out)
    assert out.getvalue().isascii()
    assert json.loads(out.getvalue())["file"] == str(path)


def test_evaluation_repeats_the_report_and_takes_folders(image_run, tmp_path):
    folder, _ = image_run
    own = predict.evaluate(Evaluate(run=folder))
    assert own["accuracy"] == report(folder)["accuracy"]
    assert own["confusion"] == report(folder)["confusion"]
    other = predict.evaluate(Evaluate(run=folder, data=str(write_folder(tmp_path / "more", 4, first=300))))
    assert other["source"]["examples"] == 12
    assert other["accuracy"] >= 0.7
    (tmp_path / "more" / "plain").rename(tmp_path / "more" / "spots")
    with pytest.raises(DataError, match="class 'spots' is unknown to the model; its classes are: 'across', 'down'"):
        predict.evaluate(Evaluate(run=folder, data=str(tmp_path / "more")))
    with pytest.raises(DataError, match="digits has pictures of 8 x 8 x 1 in 10 classes; the model of"):
        predict.evaluate(Evaluate(run=folder, data="digits"))
    with pytest.raises(DataError, match="neither one of digits, mnist, fashion-mnist nor a folder"):
        predict.evaluate(Evaluate(run=folder, data="nothing"))
    with pytest.raises(ConfigError, match="--data is empty, expected a data set, a file or a folder"):
        Evaluate(run=folder, data="")
    with pytest.raises(ConfigError, match="a folder names its classes"):
        predict.evaluate(Evaluate(run=folder, label_column="x"))


class StopAfter:
    """In place of signals: asks to stop when it was asked so many times."""

    left = 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    @property
    def requested(self):
        StopAfter.left -= 1
        return StopAfter.left < 0


def test_a_stopped_run_goes_on_bit_for_bit(command, photos, tmp_path, monkeypatch):
    """In float16, with its loss scale; other runs that go on are of float32."""
    settings = ("--data", photos, "--precision", "float16", "--shift", "1", "--flip", "--no-plots")
    settings += ("--epochs", "2", "--batch-size", "32")
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert command("train", "images", *settings, "--out", whole).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Interrupts", StopAfter)
        StopAfter.left = 3
        stopped = command("train", "images", *settings, "--out", run)
    assert stopped.code == 130, stopped.err
    progress = json.loads((run / "checkpoints" / "last.json").read_text())["progress"]
    assert progress["epoch"] == 1
    assert progress["step"] > 0
    resumed = command("train", "images", "--out", run, "--resume")
    assert resumed.code == 0, resumed.err
    assert (run / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    one, other = (
        {k: v for k, v in report(f).items() if k not in ("seconds", "phases", "memory")} for f in (run, whole)
    )
    assert one == other
    assert one["precision"] == "float16"
    saved = load_file(run / "model.safetensors")
    assert saved["features.0.weight"].dtype == "float16"
    assert saved["features.1.running_mean"].dtype == np.float32


def test_kept_pictures_give_the_same_run(command, image_run, photos, tmp_path, monkeypatch):
    """Decoded and read from the cache; the flag is of one process, so that config.json does not have it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for told in (True, False):
        run = tmp_path / str(told)
        result = command("train", "images", "--data", photos, "--out", run, *SMALL, "--cache")
        assert result.code == 0, result.err
        assert ("note: the decoded pictures are cached for the next run" in result.out) is told
        for name in ("model.safetensors", "config.json"):
            assert (run / name).read_bytes() == (image_run[0] / name).read_bytes()
    again = command("train", "images", "--out", run, "--resume", "--cache")
    assert again.code == 0, again.err
    assert "is already finished" in again.out


def test_bfloat16_is_refused_on_a_cpu(command, photos, tmp_path):
    from minidl.runtime import launch

    if not launch.INTERPRETED:
        pytest.skip("kernels are compiled here")
    result = command("train", "images", "--data", photos, "--out", tmp_path / "run", "--precision", "bfloat16")
    refused(result, "bfloat16 is not supported on the CPU (Triton's interpreter computes it wrongly): use --precision")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "cats"), "unknown image data 'cats': neither one of digits, mnist, fashion-mnist nor a folder"),
        (("--data", "digits", "--size", "8"), "--size is for your own folder: the size and splits of digits are fixed"),
        (("--data", "digits", "--cache"), "--cache is for your own folder: digits is not decoded"),
        (("--data", "digits", "--val-split", "0.5"), "--val-split is for your own folder"),
        (
            ("--data", "digits", "--model", "ece408"),
            "ece408 takes grey pictures of 28 x 28 pixels, digits has grey ones of",
        ),
        (("--data", "digits", "--shift", "8"), "--shift 8 moves pictures of 8 x 8 out of sight"),
        (("--data", "digits", "--size", "8x"), "--size is 8x, expected a height and width in pixels, such as 32 or"),
        (("--data", "digits", "--size", "0"), "--size is 0, expected a height and width from 1 to 1024"),
        (("--data", "digits", "--precision", "float8"), "expected one of float32, tf32, bfloat16, float16"),
        (("--data", "digits", "--model", "large"), "--model is large, expected one of small, ece408"),
    ],
)
def test_bad_settings_are_told_before_the_work(command, tmp_path, flags, message):
    refused(command("train", "images", *flags, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_batch_of_one_pixel_is_told_before_the_work(command, photos, tmp_path):
    flags = ("--data", photos, "--size", "1", "--batch-size", "1", "--out", tmp_path / "run")
    refused(command("train", "images", *flags), "--batch-size 1 leaves a batch of one picture of one pixel")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 2}, "2 channels with means ["),
        ({"height": 0}, "height is 0: Input should be greater than or equal to 1"),
        ({"std": [0.0]}, "std.0 is 0.0: Input should be greater than or equal to"),
        ({"mean": [1.0, 2.0]}, "1 channels with means [1.0, 2.0]"),
        ({"format": "other"}, "not a minidl-pictures file of version 1"),
        ({"more": 1}, "more is 1: Unexpected keyword argument"),
    ],
)
def test_a_damaged_description_is_told(image_run, tmp_path, change, message):
    folder = tmp_path / "run"
    older(image_run[0], folder)
    edited(folder / "pictures.json", lambda content: {**content, **change})
    edited(folder / "config.json", lambda content: {**content, "documents": {}})
    with pytest.raises(DamagedError) as caught:
        predict.load(folder)
    assert message in str(caught.value)
    assert "pictures.json is damaged" in str(caught.value)


def test_the_course_network_learns(command, tmp_path):
    folder = tmp_path / "data"
    for kind in ("across", "down"):
        (folder / kind).mkdir(parents=True)
        for i in range(10):
            Image.fromarray(stripes(kind, i, 28)).save(folder / kind / f"{i}.png")
    run = tmp_path / "run"
    flags = ("--model", "ece408", "--epochs", "2", "--batch-size", "8", "--lr", "0.001", "--no-plots")
    assert command("train", "images", "--data", folder, "--out", run, *flags).code == 0
    content = report(run)
    assert content["parameters"] == 32 * 26 + 64 * 801 + 128 * 1025 + 2 * 129
    assert predict.evaluate(Evaluate(run=run))["accuracy"] == content["accuracy"]
