"""`train images --model` of published networks: where they begin, what is frozen, and that runs are read again.

Most tests train the small network, for which a step takes a tenth of the time.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from minidl import models, random
from minidl.errors import ConfigError
from minidl.training.loop import trainer
from minidl.training.prediction import predict
from minidl.training.settings.command import Evaluate
from tests.cli.conftest import report
from tests.cli.test_images import StopAfter, answers, image_run, photos, refused, write_folder

__all__ = ["answers", "image_run", "photos"]

QUICK = ("--model", "small", "--epochs", "2", "--batch-size", "32", "--no-plots")
FIRST, LAST = "features.0.weight", "classifier"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A state_dict as a file of another library, for colour pictures in 9 classes."""
    random.manual_seed(3)
    weights = {name: value.contiguous() for name, value in models.SmallCNN(3, (7, 7), 9).state_dict().items()}
    path = tmp_path_factory.mktemp("weights") / "published.safetensors"
    save_file(weights, path)
    return path


@pytest.fixture(scope="module")
def tuned(command, photos, published, tmp_path_factory):
    """A run whose last layer alone was trained for an epoch, and then all of it for another."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    flags = ("--init", published, "--freeze", "--unfreeze", "1")
    done = command("train", "images", "--data", photos, *QUICK, *flags, "--out", folder)
    assert done.code == 0, done.err
    return folder, done.out


def test_what_was_made_anew_is_told_and_settings_are_recorded(tuned, published):
    folder, out = tuned
    assert f"12 of 14 tensors are loaded from {published}" in out
    assert f"the last layer, {LAST}, is replaced: published.safetensors knows 9 classes, the data has 3" in out
    assert f"{FIRST} reads grey pictures with the sum of its red, green and blue weights" in out
    config = json.loads((folder / "config.json").read_text())
    settings = config["config"]
    assert (settings["stem"], settings["normalize"], settings["lr"]) == (None, "imagenet", 0.01)
    assert settings["unfreeze_lr"] == 0.001
    rates = [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # The cosine of 4 steps, without warm-up at steps 1 and 3 of them.
    assert rates == pytest.approx([0.01 * (1 + np.cos(np.pi / 3 * s)) / 2 * part for s, part in ((0, 1), (2, 0.1))])
    assert "rate 0.01, 0.001 of all layers" in (folder / "report.txt").read_text()
    assert len(config["model"]["init_sha256"]) == 64
    described = json.loads((folder / "pictures.json").read_text())
    assert described["mean"] == pytest.approx([255 * (0.485 + 0.456 + 0.406) / 3])
    assert report(folder)["precision"] == "float32"
    assert report(folder)["network"] == f"small; from {published}, frozen before epoch 2"


def test_a_frozen_epoch_changes_the_last_layer_alone(command, photos, published, tmp_path):
    flags = ("--init", published, "--freeze", "--epochs", "1")
    done = command("train", "images", "--data", photos, *QUICK, *flags, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    saved, begun = load_file(tmp_path / "run" / "model.safetensors"), load_file(published)
    for name, value in begun.items():
        if not name.startswith(LAST) and name != FIRST:
            assert torch.equal(saved[name], value), name
    assert torch.allclose(saved[FIRST], begun[FIRST].sum(1, keepdim=True), atol=1e-6)
    assert saved[f"{LAST}.weight"].shape == (3, 32)


def test_all_layers_learn_after_the_frozen_epochs(tuned, published):
    last = load_file(tuned[0] / "checkpoints" / "step-000004.safetensors")
    begun = load_file(published)
    for name in ("features.2.weight", "features.3.running_mean"):
        assert not torch.equal(last[f"weights.{name}"], begun[name])


def test_a_stopped_run_goes_on_bit_for_bit_without_the_file(command, tuned, photos, published, tmp_path, monkeypatch):
    copy = shutil.copy(published, tmp_path / "copy.safetensors")
    flags = ("--init", copy, "--freeze", "--unfreeze", "1")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Interrupts", StopAfter)
        StopAfter.left = 3
        stopped = command("train", "images", "--data", photos, *QUICK, *flags, "--out", tmp_path / "run")
    assert stopped.code == 130, stopped.err
    (tmp_path / "copy.safetensors").unlink()
    assert command("train", "images", "--out", tmp_path / "run", "--resume").code == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", tuned[0]))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_evaluate_and_predict_read_the_run(tuned, answers, tmp_path):
    assert predict.evaluate(Evaluate(run=tuned[0]))["accuracy"] == report(tuned[0])["accuracy"]
    new = write_folder(tmp_path / "new", 1, first=100)
    assert len(answers(tuned[0], *sorted(new.glob("*/*.png")))) == 3


def test_a_runs_model_with_the_same_classes_keeps_its_last_layer(command, image_run, photos, tmp_path):
    flags = ("--init", image_run[0], "--epochs", "1", "--no-plots", "--normalize", "data")
    done = command("train", "images", "--data", photos, *flags, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    assert f"14 of 14 tensors are loaded from {image_run[0] / 'model.safetensors'}" in done.out
    assert "made anew" not in done.out
    assert report(tmp_path / "run")["accuracy"] >= 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("features.2.weight"), "features.2.weight is missing; expected the same network"),
        (lambda w: [w.update({f"x.{n}": w.pop(n)}) for n in list(w)], "and 20 more; expected the same network"),
        (lambda w: [w.update({f"x.{n}": w.pop(n)}) for n in list(w)], "it has x.classifier.bias, which the network"),
        (
            lambda w: w.update({"features.2.weight": w["features.2.weight"].int()}),
            "features.2.weight is of torch.int32",
        ),
        (lambda w: w["features.1.running_var"].fill_(-1), "features.1.running_var has variances below 0"),
        (lambda w: w.update(extra=torch.zeros(2)), "it has extra, which the network lacks"),
        (lambda w: w.update({"features.1.bias": torch.zeros(3)}), "features.1.bias is [3], expected [32]"),
        (lambda w: w["features.1.bias"].fill_(np.nan), "features.1.bias has values that are not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_told(command, photos, published, tmp_path, change, message):
    weights = load_file(published)
    change(weights)
    save_file(weights, tmp_path / "bad.safetensors")
    flags = ("--init", tmp_path / "bad.safetensors", "--out", tmp_path / "run")
    refused(command("train", "images", "--data", photos, *QUICK, *flags), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--init", "none.safetensors"), "--init none.safetensors cannot be read: No such file or directory"),
        (("--init", __file__), "not a safetensors file"),
        (("--freeze",), "--freeze requires --init"),
        (("--sync-batch-norm",), "--sync-batch-norm requires --shards, such as --shards 8"),
        (
            ("--sync-batch-norm", "--model", "ece408"),
            "--sync-batch-norm requires a network with batch norm; ece408 has",
        ),
        (("--init", "x", "--unfreeze", "1"), "--unfreeze requires --freeze"),
        (("--init", "x", "--freeze", "--unfreeze", "2"), "--unfreeze 2 must be less than --epochs 2"),
        (("--unfreeze-lr", "0.1"), "--unfreeze-lr requires --unfreeze"),
        (("--model", "resnet18", "--dropout", "0.5"), "--dropout is for --model small, mobilenet_v2 and vgg16_bn"),
        (("--stem", "full"), "--stem is for torchvision architectures"),
        (("--model", "vgg16_bn", "--stem", "full"), "with --stem full takes pictures from 32 x 32 pixels"),
        (("--model", "resnet18", "--batch-size", "50"), "the last layers of resnet18 have one pixel"),
    ],
)
def test_settings_that_do_not_fit_are_told_before_the_work(command, photos, tmp_path, flags, message):
    refused(command("train", "images", "--data", photos, *QUICK, *flags, "--out", tmp_path / "run"), message)
    assert not (tmp_path / "run").exists()


def test_a_resnet_trains_and_is_read_again(command, photos, tmp_path):
    """Frozen from its own first weights, whose beginning is not the one that its pictures would have."""
    begun = models.resnet18(3, channels=1)
    save_file({n: t.contiguous() for n, t in begun.state_dict().items()}, tmp_path / "own.safetensors")
    flags = ("--model", "resnet18", "--init", tmp_path / "own.safetensors", "--freeze", "--epochs", "1", "--no-plots")
    run = tmp_path / "run"
    done = command("train", "images", "--data", photos, *flags, "--out", run)
    assert done.code == 0, done.err
    settings = json.loads((run / "config.json").read_text())["config"]
    assert (settings["stem"], settings["lr"], settings["precision"]) == ("full", 0.01, "float32")
    assert predict.evaluate(Evaluate(run=run))["accuracy"] == report(run)["accuracy"]


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """Tensors of the shapes of a published resnet18 in 9 classes."""
    model = models.resnet18(9, device="meta").state_dict()
    return {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.items()}


def started(tensors, folder, channels=3, **settings):
    """What `--init` makes of a file with these tensors: (stem, what is said), or a ConfigError."""
    from minidl.training.tasks.images import PictureFormat, TrainImages
    from minidl.training.tasks.images.initial_weights import InitialWeights, initialization

    save_file(tensors, folder / "begun.safetensors")
    config = TrainImages(**{"data": "x", "out": folder, "init": str(folder / "begun.safetensors"), **settings})
    described = PictureFormat(16, 16, channels, (0.0,) * channels, (1.0,) * channels)
    if config.published and config.stem is None:
        stem = InitialWeights.read(config.init).stem(config, described, 9, "small")
        config = config.model_copy(update={"stem": stem})
    return config.stem, initialization(config, described, [str(i) for i in range(9)])[2]


def test_the_beginning_is_known_from_its_shape_and_names_of_wrappers_are_left_out(resnet, tmp_path):
    wrapped = {f"module.{name}": tensor for name, tensor in resnet.items() if not name.endswith("num_batches_tracked")}
    stem, said = started(wrapped, tmp_path, model="resnet18")
    assert stem == "full"
    assert "102 of 122 tensors are loaded from" in said
    assert "; 20 missing num_batches_tracked start at 0\nthe prefix module. of all names" in said


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda w: w.pop("layer3.0.conv1.weight"), {"model": "resnet18"}, "18: layer3.0.conv1.weight is missing;"),
        (
            lambda w: w.update({"conv1.weight": torch.zeros(64, 1, 7, 7)}), {"model": "resnet18"},
            "conv1.weight is [64, 1, 7, 7], expected [64, 3, 7, 7]: it expects grey pictures, but these are in colour",
        ),
        (lambda w: None, {"model": "resnet18", "stem": "small"}, "it has the full stem: use --stem full, or remove"),
        (lambda w: None, {"model": "resnet34"}, "; it looks like resnet18: give --model resnet18"),
        (lambda w: None, {}, "; it looks like resnet18: give --model resnet18"),
    ],
)  # fmt: skip
def test_a_file_of_another_network_is_told(resnet, tmp_path, change, settings, message):
    weights = dict(resnet)
    change(weights)
    with pytest.raises(ConfigError) as raised:
        started(weights, tmp_path, **settings)
    assert message in str(raised.value)


def test_a_file_of_torch_and_an_unfinished_run_are_told(command, image_run, photos, tmp_path):
    (tmp_path / "saved.pt").write_bytes(b"PK\x03\x04" + bytes(60))  # an archive, as torch.save makes
    unfinished = shutil.copytree(image_run[0], tmp_path / "unfinished")
    for name in ("report.json", "model.safetensors"):
        (unfinished / name).unlink()
    for given, message in (
        (tmp_path / "saved.pt", "is a file of torch.save; expected"),
        (unfinished, "is not finished"),
    ):
        flags = ("--init", given, "--out", tmp_path / "run")
        refused(command("train", "images", "--data", photos, *QUICK, *flags), message)


@pytest.mark.parametrize("name", ["resnet18", "vgg16_bn", "densenet121"])
def test_small_networks_have_the_names_of_large_ones(name):
    model = getattr(models, name)(5, channels=1, small=True, device="meta").state_dict()
    full = getattr(models, name)(5, channels=1, device="meta").state_dict()
    assert model.keys() == full.keys()
    other = {"resnet18": "conv1.weight", "densenet121": "features.conv0.weight", "vgg16_bn": "classifier.0.weight"}
    assert [key for key in full if model[key].shape != full[key].shape] == [other[name]]
