"""`train gan`: what a run holds, a stopped run that goes on bit for bit, and what is refused."""

import json
import shutil
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from minidl import models
from minidl.training.loop import trainer
from minidl.training.loop.adversaries import latents
from minidl.training.loop.gan import FIGURES, GanProgress
from minidl.training.report import samples
from tests.cli.conftest import edited, report, unfinished
from tests.cli.test_images import StopAfter, refused, write_folder

TINY = ("--width", "4", "--latent", "5", "--batch-size", "16", "--epochs", "2")


@pytest.fixture(scope="session")
def stripes(tmp_path_factory):
    """A folder of 3 class folders with 16 pictures each, brought to 8x8 by --size."""
    return write_folder(tmp_path_factory.mktemp("gan") / "stripes", 16)


@pytest.fixture(scope="session")
def gan_run(command, stripes):
    """A finished run. Tests copy it before they change it."""
    folder = stripes.parent / "run"
    result = command("train", "gan", "--data", stripes, "--size", "8", "--out", folder, *TINY)
    assert result.code == 0, result.err
    return folder, result.out


def test_a_gan_run_has_its_files(gan_run):
    folder, _ = gan_run
    expected = {
        "config.json", "environment.json", "manifest.json", "metrics.jsonl", "model.safetensors", "report.json",
        "report.txt", "report.html", "checkpoints", "samples", "training.gif",
    }  # fmt: skip
    if find_spec("matplotlib") is not None:
        expected |= {"curves.png"}
    assert {path.name for path in folder.iterdir()} == expected
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["epoch-001.png", "epoch-002.png"]
    with Image.open(folder / "samples" / "epoch-002.png") as grid, Image.open(folder / "training.gif") as film:
        assert grid.mode == "L"
        assert grid.size == film.size == (511, 511)
        assert film.n_frames == 2


def test_a_gan_report_says_what_was_trained(gan_run):
    folder, out = gan_run
    content = report(folder)
    assert content["task"] == content["kind"] == "gan"
    assert content["steps"] == 2 * (content["source"]["examples"] // 16)
    assert content["images_per_second"] > 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    for name in FIGURES:
        assert content[name] == lines[-1][name] > 0
    assert 0 < lines[0]["d_fake"] < 1
    assert json.loads((folder / "config.json").read_text())["model"] == content["model"]
    assert "epoch 2/2  loss D " in out
    assert "  D(x) 0." in out
    assert "discriminator  " in out
    assert (folder / "report.txt").read_text() in out


def test_the_saved_generator_draws_the_last_grid(gan_run):
    folder, _ = gan_run
    generator = models.load_generator(folder)
    assert (generator.size, generator.latent, generator.width) == ((8, 8), 5, 4)
    drawn = samples.grid(samples.draw(generator, latents(range(64), 5)))
    with Image.open(folder / "samples" / "epoch-002.png") as grid:
        assert np.abs(np.asarray(grid, dtype=int) - drawn[:, :, 0]).max() <= 1


def test_a_stopped_gan_goes_on_bit_for_bit(command, gan_run, stripes, tmp_path, monkeypatch):
    run = tmp_path / "run"
    steps = []
    # Within an epoch, at its end, and before the report.
    for flags, after in ((("--data", stripes, "--size", "8", *TINY), 0), (("--resume",), 0), (("--resume",), 1)):
        with monkeypatch.context() as patch:
            patch.setattr(trainer, "Interrupts", StopAfter)
            StopAfter.left = after
            stopped = command("train", "gan", *flags, "--out", run)
        assert stopped.code == 130, stopped.err
        assert f"minidl train gan --out {run} --resume" in stopped.err
        steps.append(json.loads((run / "checkpoints" / "last.json").read_text())["progress"]["steps"])
    assert steps == [1, 2, 4]
    resumed = command("train", "gan", "--out", run, "--resume")
    assert resumed.code == 0, resumed.err
    assert "continuing after" in resumed.out
    whole = gan_run[0]
    for name in ("model.safetensors", "samples/epoch-001.png", "samples/epoch-002.png", "training.gif"):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    timed = ("seconds", "images_per_second", "phases", "memory")
    one, other = ({k: v for k, v in report(f).items() if k not in timed} for f in (run, whole))
    assert one == other
    last = [json.loads((f / "checkpoints" / "last.json").read_text()) for f in (run, whole)]
    state = [load_file(f / "checkpoints" / entry["tensors"]) for f, entry in zip((run, whole), last, strict=True)]
    assert state[0].keys() == state[1].keys()
    assert all(torch.equal(state[0][name], state[1][name]) for name in state[0])


def test_a_gan_that_goes_on_under_another_environment_says_so(command, gan_run, tmp_path):
    run = unfinished(gan_run[0], tmp_path / "run")
    edited(run / "checkpoints" / "last.json", lambda state: state["environment"].update(torch="2.0.0"))
    resumed = command("train", "gan", "--out", run, "--resume", "--no-plots")
    assert resumed.code == 0, resumed.err
    assert resumed.out.count("last.json was written in another environment:\n  torch: 2.0.0 then, ") == 1
    (entry,) = report(run)["resumed"]
    assert entry["after"] == "epoch 2"
    assert entry["changes"]["torch"][0] == "2.0.0"
    assert "\nresumed          after epoch 2 with torch " in (run / "report.txt").read_text()
    assert (run / "model.safetensors").read_bytes() == (gan_run[0] / "model.safetensors").read_bytes()


def test_a_finished_gan_is_not_trained_again(command, gan_run):
    result = command("train", "gan", "--out", gan_run[0], "--resume")
    assert result.code == 0
    assert "is already finished" in result.out


def test_a_gan_run_is_replaced_with_its_pictures(command, gan_run, stripes, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gan_run[0], run)
    flags = ("--data", stripes, "--size", "8", *TINY[:-1], "1", "--no-plots", "--quiet")
    result = command("train", "gan", *flags, "--out", run, "--overwrite")
    assert (result.code, result.out) == (0, ""), result.err
    assert [path.name for path in (run / "samples").iterdir()] == ["epoch-001.png"]
    assert not (run / "curves.png").exists()
    assert not run.with_name("run.previous").exists()


def test_a_gan_run_answers_nothing(command, gan_run):
    refused(command("predict", gan_run[0], "x"), "is a gan run, which generates pictures and cannot predict")


def test_own_pictures_have_no_evaluator_of_minidls(command, gan_run):
    refused(command("evaluate", gan_run[0]), "and give --evaluator RUN")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--data", "cats"), "unknown image data 'cats'"),
        (("--data", "digits", "--size", "16"), "--size is for your own folder"),
        (("--data", "digits", "--batch-size", "1"), "--batch-size is 1, expected a whole number from 2 to"),
        (("--data", "digits", "--width", "0"), "--width is 0, expected a whole number from 1 to 1024"),
        (("--data", "digits", "--latent", "0"), "--latent is 0"),
        (("--data", "digits", "--lr", "0"), "--lr is 0.0, expected a number above 0"),
        (("--data", "digits", "--precision", "float16"), "--precision is float16, expected one of float32, tf32"),
        ((), "--data is missing"),
    ],
)
def test_bad_settings_of_a_gan_are_told_before_the_work(command, tmp_path, flags, message):
    refused(command("train", "gan", *flags, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_size_that_cannot_be_halved_is_told_before_the_work(command, stripes, tmp_path):
    flags = ("--data", stripes, "--out", tmp_path / "run")
    refused(command("train", "gan", *flags), "pictures of 7 x 7 pixels cannot be halved 2 times; give a --size")
    assert not (tmp_path / "run").exists()


def test_a_gan_that_diverges_is_told(minidl, stripes, tmp_path):
    flags = ("--data", stripes, "--size", "8", *TINY, "--lr", "1e38", "--out", tmp_path / "run")
    refused(minidl("train", "gan", *flags), "train again with a smaller --lr", code=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": -1}, "step is -1: Input should be greater than or equal to 0"),
        ({"sums": [0.0]}, "sums is [0.0]: List should have at least 4 items"),
        ({"history": []}, "expected a list of 2 epochs"),
        ({"more": 1}, "more is 1: Unexpected keyword argument"),
        ({"epoch": 9, "history": [{}] * 9}, "expected the record of epoch 1"),
    ],
)
def test_a_damaged_gan_checkpoint_is_told(command, gan_run, tmp_path, change, message):
    run = tmp_path / "run"
    shutil.copytree(gan_run[0], run)
    (run / "report.json").unlink()
    edited(
        run / "checkpoints" / "last.json",
        lambda content: {**content, "progress": {**content["progress"], **change}},
    )
    refused(command("train", "gan", "--out", run, "--resume"), message, code=2)


@pytest.mark.parametrize("change", [{"kernel": 4}, {"width": 8}, None])
def test_a_run_with_other_networks_is_not_continued(command, gan_run, tmp_path, change):
    run = tmp_path / "run"
    shutil.copytree(gan_run[0], run)
    (run / "report.json").unlink()
    edited(run / "config.json", lambda c: {**c, "model": change and {**c["model"], **change}})
    refused(command("train", "gan", "--out", run, "--resume"), "are not those of this version of minidl")


def test_progress_of_a_gan_comes_back():
    progress = GanProgress(epoch=1, step=2, steps=5, sums=[1.0, 2.0, 3.0, 4.0], count=2)
    progress.history.append({"epoch": 1, "steps": 3, "seconds": 1.0, **dict.fromkeys(FIGURES, 0.5)})
    saved = json.loads(json.dumps(progress.__dict__))
    assert GanProgress.from_saved(saved) == progress
    assert progress.means == {"loss_d": 0.5, "loss_g": 1.0, "d_real": 1.5, "d_fake": 2.0}
    assert progress.text == "epoch 1 and 2 steps"


def test_a_damaged_generator_is_told(gan_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(gan_run[0], run)
    edited(run / "config.json", lambda content: {k: v for k, v in content.items() if k != "model"})
    with pytest.raises(ValueError, match="it has no settings of a model"):
        models.load_generator(run)
