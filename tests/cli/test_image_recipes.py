"""`train images` with crops, mixed pictures, growing sizes and a moving average, stopped and gone on with."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minidl.training.loop import trainer
from minidl.training.prediction import predict
from minidl.training.settings.command import Evaluate
from tests.cli.conftest import report
from tests.cli.test_images import StopAfter, image_run, photos, refused

__all__ = ["image_run", "photos"]

RECIPE = ("--crop", "0.3", "--flip", "--mixup", "0.2", "--cutmix", "1", "--progressive", "4", "--ema", "0.9")
SHORT = ("--epochs", "3", "--batch-size", "32", "--label-smoothing", "0.1", "--no-plots")


@pytest.fixture(scope="module")
def whole(command, photos, tmp_path_factory):
    """A run with all of it, in float16, whose averages are float32, and its flags. It says which sizes it has."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    flags = ("--data", photos, *RECIPE, *SHORT, "--precision", "float16")
    done = command("train", "images", *flags, "--out", folder)
    assert done.code == 0, done.err
    assert "size of training pictures: 5 x 5, 6 x 6 from epoch 2, 7 x 7 from epoch 3\n" in done.out
    assert "epoch 2/3  size 6 x 6  loss" in done.out
    return folder, flags


def test_a_recipe_goes_on_bit_for_bit(command, whole, tmp_path, monkeypatch):
    """Stopped within the third epoch, whose pictures are larger."""
    folder, flags = whole
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Interrupts", StopAfter)
        StopAfter.left = 6
        assert command("train", "images", *flags, "--out", tmp_path / "run").code == 130
    progress = json.loads((tmp_path / "run" / "checkpoints" / "last.json").read_text())["progress"]
    assert (progress["epoch"], progress["step"]) == (2, 1)
    resumed = command("train", "images", "--out", tmp_path / "run", "--resume")
    assert resumed.code == 0, resumed.err
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_average_is_what_is_kept_and_tested(whole):
    folder, _ = whole
    saved = load_file(folder / "model.safetensors")
    best = json.loads((folder / "checkpoints" / "best.json").read_text())
    tensors = load_file(folder / "checkpoints" / best["tensors"])
    for name, tensor in saved.items():
        average = tensors[f"optimizer.average.{name}"]
        assert torch.equal(tensor, average.to(tensor.dtype)), name
        assert average.dtype in (torch.float32, torch.int64)
    assert not torch.equal(saved["features.0.weight"], tensors["weights.features.0.weight"])
    content = report(folder)
    assert content["source"]["augment"] == {
        "shift": 0,
        "flip": True,
        "crop": 0.3,
        "mixup": 0.2,
        "cutmix": 1.0,
        "progressive": 4,
        "ema": 0.9,
    }
    sizes = [json.loads(line)["size"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sizes == [[5, 5], [6, 6], [7, 7]]
    assert predict.evaluate(Evaluate(run=folder))["accuracy"] == content["accuracy"]


def test_an_average_without_a_weight_of_its_own_is_the_last_weights(command, photos, tmp_path):
    """A decay of nearly 0 keeps nothing of earlier steps."""
    for name, more in (("plain", ()), ("average", ("--ema", "1e-12"))):
        flags = ("--epochs", "1", "--batch-size", "32", "--no-plots", *more)
        assert command("train", "images", "--data", photos, "--out", tmp_path / name, *flags).code == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "average"))
    for name, tensor in one.items():
        assert torch.allclose(tensor.double(), other[name].double(), rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--progressive", "7"), "--progressive 7 is no smaller than the pictures, 7 x 7; give less"),
        (("--progressive", "1"), "--progressive 1 is less than a quarter of the pictures, 7 x 7; give more"),
        (("--crop", "0.5", "--shift", "1"), "--crop already moves the pictures at random: remove --shift or --crop"),
        (("--crop", "0"), "--crop is 0.0, expected a number above 0, at most 1"),
        (("--mixup", "-1"), "--mixup is -1.0, expected a number above 0"),
        (("--mixup", "1", "--batch-size", "1"), "--mixup mixes the pictures of a batch, but --batch-size is 1"),
        (("--ema", "1"), "--ema is 1.0, expected a number above 0, below 1"),
    ],
)
def test_settings_that_do_not_fit_are_told_before_the_work(command, photos, tmp_path, flags, message):
    refused(command("train", "images", "--data", photos, *flags, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_sizes_grow_in_steps_to_the_full_one():
    from pathlib import Path

    from minidl.training.tasks.images import TrainImages
    from minidl.training.tasks.images.stages import Stages

    def stages(epochs, size, begin):
        given = {"data": "x", "out": Path("run"), "epochs": epochs, "progressive": begin}
        return Stages.from_settings(TrainImages(**given), size)

    assert stages(20, (224, 224), 128).sizes == ((0, (128, 128)), (5, (160, 160)), (10, (192, 192)), (15, (224, 224)))
    assert stages(20, (64, 48), 24).starts == (0, 5, 10, 15)
    assert stages(20, (64, 48), 24).sizes[1] == (5, (43, 32))
    assert stages(1, (64, 64), 32).sizes == ((0, (64, 64)),)
    description = "size of training pictures: 64 x 64 throughout: one epoch cannot grow them"
    assert stages(1, (64, 64), 32).description == description
    assert [size for _, size in stages(3, (7, 7), 4).sizes] == [(5, 5), (6, 6), (7, 7)]
    assert np.all(np.diff(stages(1000, (100, 100), 30).starts) == 250)
