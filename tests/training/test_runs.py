import contextlib
import itertools
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from minidl.common import write_files
from minidl.errors import ConfigError, DamagedError, RunError
from minidl.training.report import samples
from minidl.training.run_folder import files
from minidl.training.run_folder.checkpoints import Checkpoints
from minidl.training.run_folder.folder import TRACES, RunFolder, file_names
from minidl.training.run_folder.train_settings import train_settings
from minidl.training.run_folder.training_folder import TrainingFolder, mark
from minidl.training.tasks.images import TrainImages
from minidl.training.tasks.text_settings import TrainText


def started(folder, **changes):
    config = TrainText(**{"data": "docstrings", "out": folder, **changes})
    TrainingFolder(config.out).check_out(config.resume, config.overwrite)
    TrainingFolder(config.out).start(config, "text", "0" * 64, {"labels.json": '{"labels": []}\n'})
    return config


def finished(folder, **changes):
    config = started(folder, **changes)
    complete(folder, config.epochs)
    TrainingFolder(folder).delete_previous()


def complete(folder, count):
    TrainingFolder(folder).complete(RunFolder(folder).read().identity, {"epochs": count}, "")


def epochs(folder):
    return json.loads((folder / "report.json").read_text())["epochs"]


def test_a_started_run_can_be_read_and_is_not_finished(tmp_path):
    started(tmp_path / "a" / "run", epochs=3)
    run = RunFolder(tmp_path / "a" / "run").read()
    assert (run.kind, run.config["epochs"], run.finished) == ("text", 3, False)
    with pytest.raises(ConfigError, match=r"is not finished; continue it with: minidl train text --out .*run --resume"):
        RunFolder(tmp_path / "a" / "run").read_finished()


def config_loop(folder):
    folder.mkdir()
    (folder / "config.json").symlink_to("config.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (lambda folder: folder.write_text(""), "is not a folder"),
        (lambda folder: folder.mkdir(), "has no config.json"),
        (lambda folder: (folder / "config.json").mkdir(parents=True), "its config.json is a folder"),
        (config_loop, "has no config.json"),
        (lambda folder: other_config(folder, {"a": 1}), "another program wrote"),
        (lambda folder: other_config(folder, {"format": "minidl-run", "version": 99}), "has version 99"),
        (lambda folder: other_config(folder, {"format": "minidl-run", "version": 1}), "is damaged"),
    ],
)
def test_what_is_no_run_is_told(tmp_path, make, message):
    make(tmp_path / "run")
    with pytest.raises((ConfigError, DamagedError), match=message):
        RunFolder(tmp_path / "run").read()


def test_advice_on_a_folder_that_is_not_empty_is_of_what_is_in_it(tmp_path):
    started(tmp_path / "begun")
    finished(tmp_path / "done")
    with pytest.raises(ConfigError, match="choose another folder, continue the run in it with --resume, or replace"):
        started(tmp_path / "begun")
    with pytest.raises(ConfigError, match="choose another folder, or replace the run in it with --overwrite"):
        started(tmp_path / "done")


def test_advice_after_a_write_that_failed_is_of_what_is_there(tmp_path):
    full, folder = OSError(28, "No space left on device", str(tmp_path / "run" / "a")), tmp_path / "run"

    def told(**state):
        return str(TrainingFolder(folder).write_error("text", full, **state)).partition("No space left on device")[2]

    assert told(begun=False) == ". Free some space, then run the command again"
    started(folder)
    assert (
        told() == f"; no checkpoint yet. Free some space, then continue with: minidl train text --out {folder} --resume"
    )
    assert told(is_back=True) == f"; the previous run is back in {folder}. Free some space, then run the command again"
    complete(folder, 1)
    assert told() == f"; the run in {folder} is complete nevertheless"


def other_config(folder, content):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"exists and is not empty: choose another folder$"):
        started(folder)
    with pytest.raises(ConfigError, match="--overwrite replaces runs only"):
        started(folder, overwrite=True)
    assert (folder / "thesis.txt").read_text() == "years of work"


def test_a_file_in_the_way_is_told(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file: give the name of a folder"):
        started(tmp_path / "run")


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "run").mkdir()
    started(tmp_path / "run")
    assert RunFolder(tmp_path / "run").read().kind == "text"


def test_the_replaced_run_stays_until_the_new_one_is_finished(tmp_path):
    folder, aside = tmp_path / "run", tmp_path / "run.previous"
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    assert epochs(aside) == 1
    with pytest.raises(ConfigError, match=r"not finished \(the run that it is to replace is still in .*run.previous\)"):
        RunFolder(folder).read_finished()
    assert not RunFolder(folder).read().finished
    complete(folder, 2)
    assert TrainingFolder(folder).delete_previous() is None
    assert epochs(folder) == 2
    assert not aside.exists()


def test_a_deletion_that_was_stopped_goes_on(tmp_path, monkeypatch):
    """Wherever that was, and by the command for a finished run as well."""
    folder, aside = tmp_path / "run", tmp_path / "run.previous"
    unlink = os.unlink
    for last in itertools.count():
        finished(folder, epochs=1)
        started(folder, epochs=2, overwrite=True)
        complete(folder, 2)
        left = iter(range(last))

        def stopped(path, left=left, **place):
            if next(left, None) is None:
                raise KeyboardInterrupt
            unlink(path, **place)

        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", stopped)
            with contextlib.suppress(KeyboardInterrupt):
                TrainingFolder(folder).delete_previous()
                break
        assert aside.exists()
        assert TrainingFolder(folder).delete_previous() is None
        assert not aside.exists()
        assert epochs(folder) == 2
        shutil.rmtree(folder)
    assert last == 6  # both reports, the manifest, labels.json, config.json and the mark


def test_replacing_again_after_a_stop_keeps_the_finished_run(tmp_path):
    folder, aside = tmp_path / "run", tmp_path / "run.previous"
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    started(folder, epochs=3, overwrite=True)
    assert epochs(aside) == 1
    assert RunFolder(folder).read().config["epochs"] == 3
    finished_path = folder / "report.json"
    finished_path.write_text('{"epochs": 3}')
    started(folder, epochs=4, overwrite=True)
    assert epochs(aside) == 3


def test_a_replacement_that_failed_at_once_is_undone(tmp_path):
    folder = tmp_path / "run"
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    assert TrainingFolder(folder).restore_previous()
    assert epochs(folder) == 1
    assert not (tmp_path / "run.previous").exists()
    assert not TrainingFolder(folder).restore_previous()


def test_files_of_the_user_in_a_replaced_run_are_kept(tmp_path):
    folder = tmp_path / "run"
    finished(folder)
    (folder / "notes.txt").write_text("mine")
    started(folder, overwrite=True)
    assert "run.previous" in TrainingFolder(folder).delete_previous()
    assert (tmp_path / "run.previous" / "notes.txt").read_text() == "mine"


def test_files_of_the_user_among_the_checkpoints_are_kept(tmp_path):
    folder = tmp_path / "run"
    finished(folder)
    kept = Checkpoints(folder / "checkpoints")
    kept.save(3, {"w": torch.zeros(2)}, {}, {"progress": {}}, best=True)
    kept.wait()
    names = ("step-000004.safetensors", ".last.json.x.part", ".best.json.0123456789abcdef.part", "notes.txt")
    for name in names:
        (folder / "checkpoints" / name).write_text('{"__metadata__": "mine"}')
    (folder / "checkpoints" / write_files.part("last.json")).write_text("{")
    started(folder, overwrite=True)
    assert "run.previous" in TrainingFolder(folder).delete_previous()
    assert {path.name for path in (tmp_path / "run.previous" / "checkpoints").iterdir()} == {*names}


@pytest.mark.parametrize("is_finished", [True, False])
def test_files_that_only_look_like_those_of_a_run_are_kept(tmp_path, is_finished):
    """Under every name that a run has."""
    folder = tmp_path / "run"
    finished(folder) if is_finished else started(folder)
    written = {path.name for path in folder.iterdir()}
    for part in ("checkpoints", "samples"):
        (folder / part).mkdir()
    names = {*file_names(), *TRACES, "samples/epoch-001.png", "checkpoints/best.json"} - written
    for name in names:
        (folder / name).write_text("mine")
    started(folder, overwrite=True)
    complete(folder, 2)
    assert "run.previous" in TrainingFolder(folder).delete_previous()
    aside = tmp_path / "run.previous"
    assert {str(path.relative_to(aside)) for path in aside.rglob("*") if path.is_file()} == names


def test_a_file_that_was_changed_in_a_finished_run_is_kept(tmp_path):
    folder = tmp_path / "run"
    finished(folder)
    (folder / "labels.json").write_text('{"labels": ["mine"]}')
    started(folder, overwrite=True)
    TrainingFolder(folder).delete_previous()
    assert [path.name for path in (tmp_path / "run.previous").iterdir()] == ["labels.json"]


def test_a_file_with_the_name_of_the_mark_is_the_users(tmp_path):
    folder = tmp_path / "run"
    finished(folder)
    (folder / "replaced").write_text("mine")
    TrainingFolder(folder).sweep()
    with pytest.raises(RunError, match="replaced is not part of the run, but --overwrite needs this name"):
        started(folder, overwrite=True)
    assert (folder / "replaced").read_text() == "mine"
    assert epochs(folder) == TrainText(data="docstrings", out=folder).epochs


def test_files_of_the_user_are_not_in_the_manifest(tmp_path):
    folder = tmp_path / "run"
    started(folder)
    names = {"checkpoints": ["last.json", "mine.json"], "samples": ["epoch-001.png", "mine.png"]}
    for part, inside in names.items():
        (folder / part).mkdir()
        for name in inside:
            (folder / part / name).write_text("{}")
    files.write_json(
        folder / "checkpoints" / "last.json", {"format": "", "tensors": "", "sha256": "", "progress": {}}, sealed=True
    )
    samples.write_grid(folder / "samples" / "epoch-001.png", np.zeros((1, 8, 8, 1), np.uint8))
    complete(folder, 1)
    listed = files.read_json(folder / "manifest.json")["files"]
    assert {name for name in listed if "/" in name} == {"checkpoints/last.json", "samples/epoch-001.png"}


def test_checkpoints_that_lie_elsewhere_are_kept(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "last.json").write_text("{}")
    finished(tmp_path / "run")
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    started(tmp_path / "run", overwrite=True)
    assert TrainingFolder(tmp_path / "run").delete_previous() is not None
    assert (tmp_path / "elsewhere" / "last.json").exists()


def test_a_folder_that_cannot_be_written_is_told():
    with pytest.raises(RunError, match="--out /proc/minidl/run cannot be written"):
        started(Path("/proc/minidl/run"))


def test_resuming_takes_the_settings_of_the_run(tmp_path):
    started(tmp_path / "run", epochs=3, seed=9)
    config = train_settings("text", {"out": tmp_path / "run", "resume": True, "quiet": True})
    assert (config.epochs, config.seed, config.quiet) == (3, 9, True)
    config = train_settings("text", {"out": tmp_path / "run", "resume": True, "data": "docstrings", "epochs": 3})
    assert config.seed == 9


def test_resuming_with_other_settings_is_refused(tmp_path):
    started(tmp_path / "run", epochs=3)
    with pytest.raises(
        ConfigError, match=r"other settings: --epochs is 3 in the run, 5 was given\. Remove these flags"
    ):
        train_settings("text", {"out": tmp_path / "run", "resume": True, "epochs": 5})
    with pytest.raises(ConfigError, match="is a text run; continue it with: minidl train text"):
        train_settings("table", {"out": tmp_path / "run", "resume": True})


def test_a_run_of_images_is_named(tmp_path):
    TrainingFolder(tmp_path / "run").start(TrainImages(data="digits", out=tmp_path / "run"), "images", "0" * 64, {})
    with pytest.raises(ConfigError, match="is an image run; continue it with: minidl train images"):
        train_settings("text", {"out": tmp_path / "run", "resume": True})


def test_resuming_nothing_starts_a_run(tmp_path):
    config = train_settings("text", {"out": tmp_path / "run", "resume": True, "data": "docstrings"})
    assert config.data == "docstrings"
    with pytest.raises(
        ConfigError, match=r"--resume: there is no run in .*run; name its folder, or start a run with --data"
    ):
        train_settings("text", {"out": tmp_path / "run", "resume": True})


@pytest.mark.parametrize("left", [(), ("config.json",)])
def test_a_run_that_was_killed_before_it_was_known_as_one_is_started_again(tmp_path, left):
    """By --resume and without it, with nothing left over."""
    folder = tmp_path / "run"
    for more in ({"resume": True}, {}, {"overwrite": True}):
        folder.mkdir()
        for name in left:
            (folder / write_files.part(name)).write_text("{")
        config = train_settings("text", {"out": folder, "data": "docstrings", **more})
        TrainingFolder(config.out).start(config, "text", "0" * 64, {"labels.json": "{}"})
        assert {path.name for path in folder.iterdir()} == {"config.json", "labels.json"}
        assert not (tmp_path / "run.previous").exists()
        shutil.rmtree(folder)


def test_a_run_is_known_as_one_before_anything_else_is_in_it(tmp_path, monkeypatch):
    """So that --resume takes what a killed process has left."""
    written, write = [], files.write_bytes

    def note(path, content):
        written.append(path.name)
        write(path, content)

    monkeypatch.setattr(files, "write_bytes", note)
    started(tmp_path / "run")
    assert written == ["config.json", "labels.json"]


def test_unfinished_files_are_swept_from_every_folder_of_a_run(tmp_path):
    started(tmp_path / "run")
    folders = [tmp_path / "run", tmp_path / "run" / "checkpoints", tmp_path / "run" / "samples"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        (folder / write_files.part("a.json")).write_text("{")
        for name in ("b.part", ".c.part", ".d.0123456789abcdef.part"):
            (folder / name).write_text("mine")
    TrainingFolder(tmp_path / "run").sweep()
    for folder in folders:
        assert {path.name for path in folder.glob("*.part")} == {"b.part", ".c.part", ".d.0123456789abcdef.part"}


def test_settings_that_make_no_sense_in_a_saved_run_are_damage(tmp_path):
    started(tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    saved = json.loads(path.read_text())
    saved["config"]["epochs"] = "many"
    path.write_text(json.dumps(saved))
    with pytest.raises(DamagedError, match="is damaged"):
        RunFolder(tmp_path / "run").read().settings()
    with pytest.raises(DamagedError, match="is damaged"):
        train_settings("text", {"out": tmp_path / "run", "resume": True})


def test_an_empty_folder_that_could_not_be_deleted_is_in_no_ones_way(tmp_path, monkeypatch):
    folder, aside = tmp_path / "run", tmp_path / "run.previous"
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(aside), "rmdir", mock.Mock(side_effect=OSError(30, "Read-only file system")))
        assert TrainingFolder(folder).delete_previous() is None
    assert list(aside.iterdir()) == []
    started(folder, epochs=3, overwrite=True)
    assert RunFolder(aside).read().config["epochs"] == 2
    assert TrainingFolder(folder).delete_previous() is None
    assert not aside.exists()


def test_a_neighbour_with_the_name_of_a_replaced_run_is_left_alone(tmp_path):
    mine = tmp_path / "run.previous"
    finished(mine, epochs=7)
    folder = tmp_path / "run"
    finished(folder, epochs=1)
    assert TrainingFolder(folder).delete_previous() is None
    assert not TrainingFolder(folder).restore_previous()
    assert epochs(mine) == 7
    with pytest.raises(RunError, match=r"run\.previous exists: move or delete it"):
        started(folder, epochs=2, overwrite=True)
    assert (epochs(mine), epochs(folder)) == (7, 1)


@pytest.mark.parametrize("copied", [True, False])
def test_a_replaced_run_that_was_copied_or_renamed_is_the_users(tmp_path, copied):
    folder, mine = tmp_path / "run", tmp_path / "keep.previous"
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    if copied:
        shutil.copytree(tmp_path / "run.previous", mine)
    else:
        (tmp_path / "run.previous").rename(mine)
    keep = tmp_path / "keep"
    finished(keep, epochs=3)
    assert TrainingFolder(keep).delete_previous() is None
    assert not TrainingFolder(keep).restore_previous()
    with pytest.raises(RunError, match=r"keep\.previous exists: move or delete it"):
        started(keep, epochs=4, overwrite=True)
    assert (epochs(mine), epochs(keep)) == (1, 3)
    assert not (keep / "replaced").exists()


def test_a_link_with_the_name_of_a_replaced_run_is_not_followed(tmp_path):
    finished(tmp_path / "run", epochs=1)
    started(tmp_path / "run", epochs=2, overwrite=True)
    (tmp_path / "run.previous").rename(tmp_path / "elsewhere")
    (tmp_path / "run.previous").symlink_to("elsewhere")
    assert not TrainingFolder(tmp_path / "run").restore_previous()
    assert TrainingFolder(tmp_path / "run").delete_previous() is None
    assert epochs(tmp_path / "elsewhere") == 1


def test_a_run_that_cannot_be_moved_aside_keeps_no_mark(tmp_path, monkeypatch):
    """As that of a mount point."""
    folder = tmp_path / "run"
    finished(folder, epochs=1)
    monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=OSError(16, "Device or resource busy")))
    with pytest.raises(RunError, match="Device or resource busy"):
        started(folder, epochs=2, overwrite=True)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "labels.json", "manifest.json", "report.json", "report.txt",
    }  # fmt: skip


@pytest.mark.parametrize("step", range(7))
def test_a_ctrl_c_while_a_run_is_replaced_puts_it_back(tmp_path, monkeypatch, step):
    """After each step that changes the folders, up to the new config.json."""
    folder = tmp_path / "run"
    finished(folder, epochs=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = []

    def stopped(owner, name):
        real = getattr(owner, name)

        def call(*args, **options):
            real(*args, **options)
            done.append(name)
            if len(done) == step + 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(owner, name, call)

    for owner, name in (
        (Path, "rename"),
        (os, "replace"),
        (files, "flush_folder"),
        (files, "make_folder"),
    ):
        stopped(owner, name)
    with pytest.raises(KeyboardInterrupt):
        started(folder, epochs=2, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_mark_that_a_killed_process_left_goes_when_its_run_goes_on(tmp_path):
    """Else a run that the user then renames would be deleted."""
    folder = tmp_path / "run"
    started(folder, epochs=1)
    files.write_json(folder / "replaced", mark(folder, "run.previous"))
    TrainingFolder(folder).sweep()
    assert not (folder / "replaced").exists()


@pytest.mark.parametrize("name", ["checkpoints", "samples"])
@pytest.mark.parametrize("change", [{"resume": True}, {"overwrite": True}])
def test_a_folder_of_a_run_that_is_a_link_is_refused(tmp_path, name, change):
    outside = tmp_path / "outside"
    outside.mkdir()
    for mine in ("step-000001.safetensors", "epoch-0001.png", ".foo.part", "last.json"):
        (outside / mine).write_text("mine")
    folder = tmp_path / "run"
    config = started(folder)
    (folder / name).symlink_to(outside)
    complete(folder, 1)
    wanted = config.model_copy(update=change)
    message = rf"run/{name} is a link to .*outside, and minidl writes only inside .*run"
    with pytest.raises(ConfigError, match=message), TrainingFolder(folder).lock(wanted.resume, wanted.overwrite):
        pytest.fail("nothing may be written")
    if "resume" in change:
        with pytest.raises(ConfigError, match="is a link"):
            TrainingFolder(folder).finished_report()
    assert {path.read_text() for path in outside.iterdir()} == {"mine"}
    assert len(list(outside.iterdir())) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"run", "outside"}


def test_a_run_whose_folder_is_a_link_is_that_of_the_folder(tmp_path):
    finished(tmp_path / "real", epochs=1)
    (tmp_path / "link").symlink_to("real")
    config = started(tmp_path / "link", epochs=2, overwrite=True)
    assert config.out == tmp_path / "real"
    assert epochs(tmp_path / "real.previous") == 1
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", r"--out is '\.', expected the name of a folder, such as runs/first"),
        ("", r"--out is '\.', expected the name of a folder"),
        ("..", r"--out is '\.\.', expected the name of a folder"),
        ("/", "--out is '/', expected the name of a folder"),
        ("\u00e9" * 121, "--out is a name of 242 bytes, expected at most 240"),
    ],
)
def test_a_folder_without_a_name_that_can_be_used(name, message):
    with pytest.raises(ConfigError, match=message):
        TrainText(data="docstrings", out=Path(name))


def test_the_longest_name(tmp_path):
    folder = tmp_path / ("n" * 240)
    finished(folder, epochs=1)
    started(folder, epochs=2, overwrite=True)
    with TrainingFolder(folder).lock(resume=True, overwrite=False):
        (folder / "report.json").write_text('{"epochs": 2}')
        TrainingFolder(folder).delete_previous()
    assert {path.name for path in tmp_path.iterdir()} == {folder.name}


def test_a_run_that_was_made_in_the_meantime_is_not_overwritten(tmp_path):
    config = TrainText(data="docstrings", out=tmp_path / "run")
    TrainingFolder(config.out).check_out(config.resume, config.overwrite)
    finished(tmp_path / "run", epochs=7)
    with (
        pytest.raises(ConfigError, match="exists and is not empty"),
        TrainingFolder(config.out).lock(config.resume, config.overwrite),
    ):
        pytest.fail("nothing may be written")
    assert epochs(tmp_path / "run") == 7
