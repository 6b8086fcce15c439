"""Files of a run that were deleted, altered or exchanged: each is told by name, and nothing is scored or answered."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from minidl.training.run_folder import files
from tests.cli.conftest import edited, older, report, unfinished


def refused(result, *words):
    assert result.code == 2, result.err
    notes, _, error = result.err.rpartition("error: ")
    assert all(line.startswith("note: ") for line in notes.splitlines())
    for word in words:
        assert word in error


def resumed(command, folder, kind="table"):
    return command("train", kind, "--out", folder, "--resume", "--no-plots")


def test_an_unfinished_run_is_finished_by_resume(command, text_run, tmp_path):
    folder = unfinished(text_run[0], tmp_path / "run")
    result = resumed(command, folder, "text")
    assert result.code == 0, result.err
    assert report(folder)["confusion"] == report(text_run[0])["confusion"]


def test_a_run_without_its_best_state_is_not_scored(command, table_run, tmp_path):
    folder = unfinished(table_run[0], tmp_path / "run")
    (folder / "checkpoints" / "best.json").unlink()
    refused(resumed(command, folder), "best.json is damaged (it is missing, and epoch")
    assert not (folder / "report.json").exists()


def test_the_best_state_of_another_epoch_is_not_scored(command, table_run, tmp_path):
    folder = unfinished(table_run[0], tmp_path / "run")

    def one_epoch_less(content):
        content["progress"]["epoch"] -= 1
        content["progress"]["best_epoch"] -= 1
        content["progress"]["history"].pop()

    edited(folder / "checkpoints" / "best.json", one_epoch_less)
    refused(resumed(command, folder), "best.json is damaged (it is of epoch")


@pytest.mark.parametrize("harm", ["gone", "empty", "changed", "folder"])
def test_documents_are_written_again_by_resume(command, text_run, tmp_path, harm):
    folder = unfinished(text_run[0], tmp_path / "run")
    for name in ("labels.json", "vocabulary.json"):
        if harm == "gone":
            (folder / name).unlink()
        else:
            (folder / name).write_text("" if harm == "empty" else (folder / name).read_text().replace("crude", "oil"))
    if harm == "folder":
        (folder / "labels.json").unlink()
        (folder / "labels.json").mkdir()
        result = resumed(command, folder, "text")
        assert result.code == 1
        assert "labels.json cannot be written: Is a directory" in result.err
        return
    result = resumed(command, folder, "text")
    assert result.code == 0, result.err
    assert "labels.json was missing or changed" in result.out
    for name in ("labels.json", "vocabulary.json", "config.json"):
        assert (folder / name).read_bytes() == (text_run[0] / name).read_bytes()


@pytest.mark.parametrize("harm", ["gone", "cut off"])
def test_the_epochs_of_a_run_are_written_again_by_resume(command, table_run, tmp_path, harm):
    folder = unfinished(table_run[0], tmp_path / "run")
    path = folder / "metrics.jsonl"
    path.unlink() if harm == "gone" else path.write_bytes(path.read_bytes()[:-9])
    assert resumed(command, folder).code == 0
    assert path.read_bytes() == (table_run[0] / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["config.json", "checkpoints/last.json", "checkpoints/best.json"])
def test_a_wrong_bit_in_settings_or_state_is_told(command, table_run, tmp_path, name):
    """Such as in the sum of losses, which no other check could see."""
    folder = unfinished(table_run[0], tmp_path / "run")
    path = folder / name
    raw = path.read_bytes()
    # The digit of the seed, or the first after the point: another digit, whatever it is.
    place = raw.index(b'"seed": 0') + 8 if name == "config.json" else raw.index(b".", raw.index(b'"seconds": ')) + 1
    path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    refused(resumed(command, folder), f"{path.name} is damaged (its content does not match its checksum)")


def test_a_schema_is_written_again_by_resume(command, table_run, tmp_path):
    folder = unfinished(table_run[0], tmp_path / "run")
    edited(folder / "schema.json", lambda content: content.update(target_mean=0.0))
    assert resumed(command, folder).code == 0
    assert (folder / "schema.json").read_bytes() == (table_run[0] / "schema.json").read_bytes()


def test_tensors_that_the_checkpoint_does_not_name_are_refused(command, table_run, tmp_path):
    folder = unfinished(table_run[0], tmp_path / "run")
    path = folder / "checkpoints" / json.loads((folder / "checkpoints" / "last.json").read_text())["tensors"]
    files.write_tensors(path, {name: tensor * 2 for name, tensor in load_file(path).items()})
    refused(resumed(command, folder), f"{path.name} is damaged (its values are intact, but are not those")


@pytest.mark.parametrize(("name", "value"), [("seed", 7), ("batch_size", 8), ("epochs", 80), ("ignore", ["age"])])
def test_settings_that_were_edited_are_refused(command, table_run, tmp_path, name, value):
    folder = unfinished(table_run[0], tmp_path / "run")
    before = (folder / "checkpoints" / "last.json").read_bytes()
    edited(folder / "config.json", lambda content: content.pop("run") and content["config"].update({name: value}))
    result = resumed(command, folder)
    assert result.code == 2
    assert name == "ignore" or f"config.json is damaged ({name} differ from those in" in result.err
    assert (folder / "checkpoints" / "last.json").read_bytes() == before


def put(path, value):
    """A change of the JSON value at `path`, such as "progress.epoch"."""

    def change(content):
        *outer, last = path.split(".")
        for name in outer:
            content = content[name]
        content[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("environment") and None, "environment.threads is None"),
        (put("environment", 3), "environment.threads is None"),
        (put("environment.threads", "two"), "environment.threads is 'two'"),
        (put("config", None), "it has no settings"),
        (put("schedule", None), "schedule: it is None"),
        (put("schedule.step", 1), "schedule: it is {"),
        (put("generator", []), "generator: the random state"),
        (put("generator.stream", "x"), "generator: "),
        (put("optimizer", 5), "optimizer is 5, expected its state"),
        (lambda content: content.pop("optimizer") and None, "'optimizer' is missing"),
        (lambda content: content.pop("sha256") and None, "'sha256' is missing"),
        (put("tensors", 5), "names 5 as its tensor file"),
        (put("progress", []), "progress: it is []: Input should be an object"),
        (put("progress.epoch", "zz"), "progress: epoch is 'zz': Input should be a valid integer"),
        (put("progress.epoch", 7), "progress: history is"),
        (put("progress.steps", 1), "schedule: it is {"),
        (put("progress.step", 100000), "an epoch has"),
        (put("progress.history", 5), "progress: history is 5: Input should be a valid array"),
        (put("progress.history", [{}] * 8), "progress: history.0 is {}, expected the record of epoch 1"),
        (put("progress.skipped", None), "progress: skipped is None"),
        (put("progress.finished", 1), "progress: finished is 1: Input should be a valid boolean"),
        (put("progress.best_epoch", 9), "progress: best_epoch is 9, expected at most 8"),
        (put("progress.best_score", math.nan), "NaN is not a finite number"),
        (put("progress.best_score", "high"), "progress: best_score is 'high'"),
        (put("progress.loss_sum", math.inf), "Infinity is not a finite number"),
    ],
)
def test_a_checkpoint_that_was_altered(command, table_run, tmp_path, change, message):
    folder = unfinished(table_run[0], tmp_path / "run")
    edited(folder / "checkpoints" / "last.json", change)
    refused(resumed(command, folder), "last.json", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("kind", []), "kind is [], expected text or table"),
        (put("data_sha256", None), "data_sha256 is None"),
        (put("documents", 3), "documents is 3"),
        (put("config.ignore", 5), "--ignore is 5, expected names of columns"),
        (put("config.target", 5), "--target is 5, expected the name of a column"),
        (put("config.lr", 10**400), "--lr is"),
        (put("config.hidden", [[1]]), "--hidden is [1], expected layer sizes"),
    ],
)
def test_settings_of_other_types(command, table_run, tmp_path, change, message):
    for folder in (
        older(table_run[0], tmp_path / "run"),
        unfinished(older(table_run[0], tmp_path / "old"), tmp_path / "open"),
    ):
        edited(folder / "config.json", change)
        refused(resumed(command, folder), "config.json is damaged", message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("target_mean") and None, "it lacks target_mean"),
        (lambda content: content.pop("target_scale") and None, "it lacks target_scale"),
        (lambda content: content["columns"][0].pop("mean") and None, "it lacks columns.0.mean"),
        (lambda content: content["columns"][0].pop("scale") and None, "it lacks columns.0.scale"),
        (put("columns", []), "columns is []: List should have at least 1 item"),
        (put("target_mean", 10**400), "Input should be a finite number"),
    ],
)
def test_a_schema_that_lacks_something_has_no_defaults(command, table_run, tmp_path, change, message):
    folder = older(table_run[0], tmp_path / "run")
    edited(folder / "schema.json", change)
    row = '{"size": 100, "age": 10, "kind": "house"}'
    refused(command("predict", folder, row), "schema.json is damaged (its content does not match its checksum")
    # Runs of older versions have no checksums of their documents.
    edited(folder / "config.json", lambda content: content.pop("documents") and None)
    refused(command("predict", folder, row), "schema.json is damaged", message)


PLACES = """report.json task, report.json data, report.json epochs, report.json seconds, report.json rmse,
report.json parameters, report.json device, report.json baseline, report.json baseline.mean,
report.json baseline.mean.rmse, metrics.jsonl loss, metrics.jsonl validation, metrics.jsonl validation.rmse,
metrics.jsonl epoch, config.json config.lr"""


@pytest.mark.parametrize("value", [None, [], {}, "x", 10**400, [[1]], {"a": "b"}, "\ud800"])
def test_what_is_compared_may_have_any_values(command, table_run, tmp_path, value):
    """Each is shown, or told as damage."""
    refusals = 0
    for number, (name, place) in enumerate(each.split() for each in PLACES.split(",")):
        folder = older(table_run[0], tmp_path / str(number))
        path = folder / name
        first, *others = path.read_text().splitlines() if name == "metrics.jsonl" else [path.read_text()]
        path.write_text(first)
        edited(path, put(place, value))
        path.write_text("\n".join([path.read_text(), *others]) + "\n")
        done = command("compare", folder, table_run[0], "--html", tmp_path / "all.html")
        if done.code:
            refused(done, f"{name} is damaged (", "restore it or train again")
            refusals += 1
    assert refusals >= 2


@pytest.mark.parametrize("name", ["labels.json", "vocabulary.json"])
def test_a_document_that_was_altered(command, text_run, tmp_path, name):
    folder = older(text_run[0], tmp_path / "run")
    path = folder / name
    path.write_text(path.read_text().replace("crude", "crudes"))
    refused(command("predict", folder, "oil"), f"{name} is damaged (its content does not match its checksum")


def test_a_run_without_checksums_of_its_documents_is_read(command, text_run, tmp_path):
    folder = older(text_run[0], tmp_path / "run")
    edited(folder / "config.json", lambda content: content.pop("documents") and None)
    assert json.loads(command("predict", folder, "crude oil barrel").out)["label"] == "crude"


@pytest.mark.parametrize("content", ["", "junk", "{}", "[]", None])
def test_a_report_that_is_none_does_not_finish_a_run(command, text_run, tmp_path, content):
    folder = unfinished(text_run[0], tmp_path / "run")
    if content is None:
        (folder / "report.json").mkdir()
    else:
        (folder / "report.json").write_text(content)
    refused(command("predict", folder, "oil"), "is not finished; continue it with")


@pytest.mark.parametrize("content", [b"caf\xe9", None])
def test_the_report_as_text_is_told_when_it_is_lost(command, text_run, tmp_path, content):
    folder = older(text_run[0], tmp_path / "run")
    (folder / "report.txt").unlink()
    if content is not None:
        (folder / "report.txt").write_bytes(content)
    refused(resumed(command, folder, "text"), "report.txt is", "train again")


@pytest.mark.parametrize("name", ["labels.json", "vocabulary.json", "model.safetensors"])
@pytest.mark.parametrize("harm", ["folder", "loop"])
def test_a_folder_or_a_loop_in_place_of_a_file(command, text_run, tmp_path, name, harm):
    folder = older(text_run[0], tmp_path / "run")
    (folder / name).unlink()
    if harm == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name)
    refused(command("predict", folder, "oil"), f"{name} is damaged", "restore it or train again")


def test_weights_that_do_not_fit_get_advice_that_a_user_can_follow(command, text_run, tmp_path):
    folder = older(text_run[0], tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    weights.pop("0.bias")
    files.write_tensors(folder / "model.safetensors", weights)
    result = command("predict", folder, "oil")
    refused(result, "model.safetensors is damaged (0.bias is missing", "restore it or train again")
    assert "strict" not in result.err


def test_weights_that_are_not_finite_answer_nothing(command, text_run, tmp_path):
    folder = older(text_run[0], tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    files.write_tensors(folder / "model.safetensors", {name: tensor * math.nan for name, tensor in weights.items()})
    for result in (command("predict", folder, "oil"), command("evaluate", folder)):
        refused(result, "has values that are not finite: training had diverged")
        assert result.out == ""


def test_outputs_that_are_not_finite_answer_nothing(command, text_run, tmp_path):
    folder = older(text_run[0], tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    files.write_tensors(folder / "model.safetensors", {name: tensor * 1e30 for name, tensor in weights.items()})
    for result in (command("predict", folder, "crude oil barrel"), command("evaluate", folder)):
        refused(result, "outputs are not finite")
        assert result.out == ""


def test_settings_far_larger_than_their_weights_take_no_memory(command, text_run, table_run, tmp_path):
    """Layers of 65536 x 65536 would be 17 GB, of a file of kilobytes."""
    for number, (run, asked) in enumerate(
        ((text_run[0], "oil"), (table_run[0], '{"size": 1, "age": 1, "kind": "flat"}'))
    ):
        folder = older(run, tmp_path / str(number))
        edited(folder / "config.json", put("config.hidden", [65536, 65536]))
        refused(command("predict", folder, asked), "model.safetensors is damaged (no weight is ", "65536")


def test_labels_that_are_no_text_answer_nothing(command, text_run, tmp_path):
    folder = older(text_run[0], tmp_path / "run")
    edited(folder / "config.json", lambda content: content.pop("documents") and None)
    edited(folder / "labels.json", lambda content: content["labels"].__setitem__(0, "\ud800"))
    refused(command("predict", folder, "oil"), "labels.json is damaged (", "surrogates not allowed")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_weights_of_a_type_that_minidl_never_writes(command, text_run, tmp_path, kind):
    folder = older(text_run[0], tmp_path / "run")
    weights = load_file(folder / "model.safetensors")
    name = min(weights)
    files.write_tensors(folder / "model.safetensors", {**weights, name: weights[name].to(kind)})
    refused(command("predict", folder, "oil"), f"{name} is of {str(kind).removeprefix('torch.')}")


@pytest.mark.parametrize(
    ("categories", "message"),
    [
        (["flat", "flat"], "columns.2.categories is ['flat', 'flat']: two of them are equal"),
        ([f"c{i}" for i in range(101)], "should have at most 100 items"),
        (["\ud800"], "surrogates not allowed"),
    ],
)
def test_categories_that_training_never_makes(command, table_run, tmp_path, categories, message):
    folder = older(table_run[0], tmp_path / "run")
    edited(folder / "config.json", lambda content: content.pop("documents") and None)
    edited(folder / "schema.json", lambda content: content["columns"][2].update(categories=categories))
    refused(command("predict", folder, '{"size": 1, "age": 1, "kind": "flat"}'), "schema.json is damaged", message)
