from pathlib import Path

import pytest
from pydantic import ValidationError

from minidl.data import hashing
from minidl.errors import ConfigError
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import SCORES
from minidl.training.settings import fields
from minidl.training.settings.command import Evaluate, Predict, Session, Training
from minidl.training.settings.declaration import differences
from minidl.training.tasks import text_settings
from minidl.training.tasks.gan import TrainGan
from minidl.training.tasks.images import TrainImages
from minidl.training.tasks.table import TrainTable
from minidl.training.tasks.text_settings import TrainText


def text(**changes):
    return TrainText(**{"data": "docstrings", "out": Path("run"), **changes})


def test_settings_cannot_be_changed_after_they_were_checked():
    with pytest.raises(ValidationError, match="frozen"):
        text().epochs = 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": ()}, "--hidden is none, expected at least one layer size"),
        ({"hidden": (0,)}, "--hidden is 0, expected layer sizes from 1"),
        ({"dropout": 1.0}, "--dropout is 1.0, expected a number from 0 to below 1"),
        ({"optimizer": "lion"}, "--optimizer is lion, expected one of adamw, adam, rmsprop, adagrad, sgd"),
        ({"lr": 0.0}, "--lr is 0.0, expected a number above 0"),
        ({"lr": float("nan")}, "--lr is nan, expected a number above 0"),
        ({"lr": 1e-320}, "--lr is 1e-320, expected a number above 0 that float32 holds"),
        ({"weight_decay": 1e-46}, "--weight-decay is 1e-46, expected a number of at least 0 that float32 holds"),
        ({"lr": 1e39}, "--lr is 1e+39, expected a number above 0 that float32 holds"),
        ({"weight_decay": 1e308}, "--weight-decay is 1e+308, expected a number of at least 0 that float32 holds"),
        ({"data": "a\udcff.csv"}, "--data is a\udcff.csv, expected a name in UTF-8"),
        ({"text_column": "a\udcff"}, "expected a name in UTF-8"),
        ({"text_column": 5}, "--text-column is 5, expected the name of a column"),
        ({"weight_decay": -1.0}, "--weight-decay is -1.0"),
        ({"schedule": "step"}, "--schedule is step, expected one of constant, cosine, linear"),
        ({"warmup": 10.0, "epochs": 10}, "--warmup 10 must be less than --epochs 10"),
        ({"label_smoothing": 1.0}, "--label-smoothing is 1.0"),
        ({"balance": 2.0}, "--balance is 2.0, expected a number from 0 to 1"),
        ({"epochs": 0}, "--epochs is 0, expected a whole number from 1"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"patience": -1}, "--patience is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"precision": "float8"}, "--precision is float8, expected one of float32, tf32"),
        ({"val_split": 1.0}, "--val-split is 1.0, expected a share between 0 and 1"),
        ({"device": "tpu"}, "--device is tpu, expected one of auto, cuda, cpu"),
        ({"resume": True, "overwrite": True}, "--resume continues a run and --overwrite replaces it"),
        ({"ngrams": 0}, "--ngrams is 0"),
        ({"min_df": 0}, "--min-df is 0"),
        ({"max_features": 0}, "--max-features is 0"),
        ({"features": "words"}, "--features is words, expected one of tfidf, hash"),
        (
            {"features": "hash", "max_features": 2**24 + 1},
            "--max-features is 16777217, expected at most 16777216 columns",
        ),
        ({"epochs": True}, "--epochs is True, expected a whole number from 1 to 1000000"),
        ({"epochs": "3"}, "--epochs is 3, expected a whole number from 1 to 1000000"),
        ({"lazy": 1}, "--lazy is 1, expected true or false"),
        ({"size": None}, "--size is not a setting of this command"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_expected(changes, message):
    with pytest.raises(ConfigError) as caught:
        text(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore": 5}, "--ignore is 5, expected names of columns"),
        ({"ignore": ("a", 5)}, "--ignore is a,5, expected names of columns"),
        ({"target": []}, "--target is"),
        ({"task": "ranking"}, "--task is ranking"),
        ({"missing": "drop"}, "--missing is drop, expected one of error, fill"),
    ],
)
def test_a_bad_setting_of_a_table_is_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainTable(data="diabetes", out=Path("run"), **changes)


def test_the_identity_is_every_setting_that_decides_the_result():
    identity = text(hidden=(64, 32), quiet=True, plots=False, capture=False).identity()
    assert identity["hidden"] == [64, 32]
    assert not {"out", "device", "resume", "overwrite", "quiet", "plots", "capture"} & identity.keys()
    assert Training.model_fields.keys() - Session.model_fields.keys() - TrainText.earlier.keys() <= identity.keys()


def test_saved_settings_come_back():
    before = text(hidden=(64, 32), seed=7, ngrams=2)
    assert TrainText(**before.identity(), out=Path("run")) == before


def test_defaults_of_a_texts_features_follow_their_kind():
    usual, named, hashed = (text(**options) for options in ({}, {"features": "tfidf"}, {"features": "hash"}))
    assert (usual.min_df, usual.max_features) == (named.min_df, named.max_features) == (2, 20_000)
    assert (hashed.min_df, hashed.max_features) == (1, 2**16)
    explicit = text(features="hash", min_df=2, max_features=20_000)
    for one in (usual, named, hashed, explicit):
        assert TrainText(**one.identity(), out=Path("run")) == one
    assert text(max_features=2**24 + 1).max_features == 2**24 + 1
    assert text_settings._MOST_COLUMNS == hashing.MOST_COLUMNS


def test_differences_are_told_by_flag():
    saved = text(epochs=5, hidden=(64,), batch_size=256).identity()
    assert differences(saved, {"epochs": 5, "hidden": (64,)}) == []
    assert differences(saved, {"batch_size": 3, "hidden": (64, 8)}) == [
        "--batch-size is 256 in the run, 3 was given",
        "--hidden is 64 in the run, 64,8 was given",
    ]


@pytest.mark.parametrize(("texts", "sizes"), [(["128"], (128,)), (["256,128", " 64"], (256, 128, 64))])
def test_layer_sizes_may_be_repeated_or_listed(texts, sizes):
    assert fields.parse_sizes(texts) == sizes


@pytest.mark.parametrize("text", ["a", "1,,2", "-3", "1.5", "٣٣x"])
def test_what_is_no_list_of_sizes_is_refused(text):
    with pytest.raises(ConfigError, match="not a layer size"):
        fields.parse_sizes([text])


def test_an_evaluation_takes_a_file_of_any_name_but_the_empty_one():
    name = "new\udcff.csv"  # as Python reads a byte that is no UTF-8
    assert Evaluate(run=Path("run"), data=name).data == name
    with pytest.raises(ConfigError, match="expected a name in UTF-8, which --json can record"):
        Evaluate(run=Path("run"), data=name, json=Path("scores.json"))
    with pytest.raises(ConfigError, match="--data is empty, expected a data set, a file or a folder"):
        Evaluate(run=Path("run"), data="")


def test_an_error_may_name_a_file_whose_name_is_no_utf8():
    path = Path("no\udcff/scores.json")
    with pytest.raises(ConfigError) as caught:
        check_output("--json", path, SCORES)
    assert str(caught.value).startswith(f"--json {path}: {path.parent} is not a folder")


def test_a_prediction_takes_inputs_or_a_file():
    with pytest.raises(ConfigError, match="use one of them"):
        Predict(run=Path("run"), inputs=("a",), file=Path("f"))
    with pytest.raises(ConfigError, match="--top is 0"):
        Predict(run=Path("run"), top=0)
    with pytest.raises(ConfigError, match="--device is gpu"):
        Evaluate(run=Path("run"), device="gpu")


def images(**changes):
    return TrainImages(**{"data": "digits", "out": Path("run"), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vgg"}, "--model is vgg, expected one of small, ece408"),
        ({"size": (8,)}, "--size is 8, expected a height and width from 1 to 1024"),
        ({"size": (8, 1025)}, "--size is 8,1025, expected a height and width"),
        ({"size": "8"}, "--size is 8, expected a height and width"),
        ({"shift": -1}, "--shift is -1, expected a whole number from 0 to 1024"),
        ({"flip": 1}, "--flip is 1, expected true or false"),
        ({"precision": "double"}, "--precision is double, expected one of float32, tf32, bfloat16, float16"),
    ],
)
def test_a_bad_setting_of_images_is_named(changes, message):
    with pytest.raises(ConfigError) as caught:
        images(**changes)
    assert message in str(caught.value)


def test_half_precision_is_for_images():
    assert images(precision="float16").precision == "float16"
    with pytest.raises(ConfigError, match="--precision is float16, expected one of float32, tf32"):
        text(precision="float16")


def test_settings_of_images_are_saved_and_read():
    one = images(size=(8, 9), flip=False, shift=2)
    saved = one.identity()
    assert saved["size"] == [8, 9]
    assert TrainImages(**saved, out=Path("run")) == one


@pytest.mark.parametrize(("text_", "size"), [("8", (8, 8)), ("8x9", (8, 9)), ("8X9", (8, 9))])
def test_a_size_is_parsed(text_, size):
    assert fields.parse_size(text_) == size


@pytest.mark.parametrize("text_", ["0", "16x0", "1025"])
def test_a_size_out_of_range_is_told_as_it_was_typed(text_):
    with pytest.raises(ConfigError, match=f"--size is {text_}, expected a height and width from 1 to 1024"):
        fields.parse_size(text_)


@pytest.mark.parametrize("text_", ["", "x", "8x", "8x9x3", "-8", "8.5", "9" * 5000, "\N{ARABIC-INDIC DIGIT EIGHT}"])
def test_a_bad_size_is_told(text_):
    with pytest.raises(
        ConfigError, match=r"--size is .{,40}, expected a height and width in pixels, such as 32 or 32x"
    ):
        fields.parse_size(text_)


def test_a_gans_settings_follow_its_data():
    small, large = (TrainGan(data=data, out=Path("run")) for data in ("digits", "mnist"))
    assert (small.width, small.latent, small.batch_size, small.epochs, small.lr) == (16, 32, 32, 10, 1e-3)
    assert (large.width, large.latent, large.batch_size, large.epochs, large.lr) == (64, 100, 128, 65, 6e-4)
    config = TrainGan(data="mnist", out=Path("run"), epochs=3, size=(28, 28))
    assert config.epochs == 3
    assert TrainGan(**config.identity(), out=Path("run")) == config
    assert config.identity().keys() == {
        "data", "size", "latent", "width", "epochs", "batch_size", "lr", "seed", "shards", "sync_batch_norm",
        "precision",
    }  # fmt: skip


def test_data_of_a_gan_has_a_name_that_its_run_can_record():
    with pytest.raises(ConfigError, match="expected a name in UTF-8"):
        TrainGan(data="photos\udcff", out=Path("run"))


def test_a_setting_as_in_earlier_runs_is_not_part_of_the_run():
    """A run of an earlier version, which lacks it, is the same run."""
    assert text().identity()["nfc"] is True
    assert "nfc" not in text(nfc=False).identity()
    assert text(ngrams="1-2").identity()["ngrams"] == text(ngrams=2).identity()["ngrams"] == 2
    assert text(ngrams="2-3").identity()["ngrams"] == "2-3"
