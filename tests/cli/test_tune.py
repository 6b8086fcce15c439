"""`minidl tune` on the CPU: one small family within seconds, what is written, and what is refused."""

import errno
import json
import os
import signal

import pytest

from minidl.runtime import launch, tile_tables
from minidl.tools.tuning import files, search
from minidl.tools.tuning.check import Check
from minidl.tools.tuning.search import SearchResult, Trial
from tests.cli.conftest import ROOT, start

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="of the interpreter's table")


@pytest.fixture
def quick(monkeypatch):
    """A search that finds twice the block ahead, without measuring."""

    class Searcher:
        def __init__(self, shape_class, check, device):
            assert type(check) is Check
            self.shape_class = shape_class

        def search(self, deadline, told, width):
            sizes = {name: 2 * size for name, size in self.shape_class.tile.sizes.items()}
            tile = launch.Tile(sizes, self.shape_class.tile.num_warps, self.shape_class.tile.num_stages)
            trial = Trial(tile, search.TIMED, ms={"a": 1.0}, ratios={"a": 2.0})
            return SearchResult(self.shape_class, [trial], tile, trial, candidates=1)

    monkeypatch.setattr("minidl.tools.tuning.run.Searcher", Searcher)


def test_a_small_family_is_really_tuned(minidl, tmp_path):
    out, record, drawn = tmp_path / "tiles", tmp_path / "r.json", tmp_path / "r.svg"
    done = minidl("tune", "gemm_sum", "--budget", 2, "--out", out, "--json", record, "--plot", drawn)
    assert done.code == 0, done.err
    assert "gemm_sum: all other shapes: " in done.out
    (measured,) = json.loads(record.read_text())["classes"]
    assert any(trial["outcome"] == "timed" for trial in measured["trials"])
    assert drawn.read_text().count("<svg") == 1
    if measured["chosen"]:
        assert f"export MINIDL_TILES={out}" in done.out
        assert tile_tables.load(out / "gemm_sum.json") != launch.table("gemm_sum")
    else:
        assert not out.exists()


def test_list_shows_the_classes_with_tiles_and_problems(command):
    lines = command("tune", "softmax", "--list").out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["softmax"] * 3 + ["softmax_grad"] * 3 + [
        "softmax_grad_loop",
        "softmax_loop",
    ]
    assert lines[0] == "softmax: N to 64: M=1024 N=64 (8 candidates; 4096x64 float32)"
    (one,) = command("tune", "softmax", "--only", "softmax: N to 512", "--list").out.splitlines()
    assert one.startswith("softmax: N to 512: ")


def test_new_tiles_are_written_and_used_where_the_variable_says(command, quick, tmp_path):
    out = tmp_path / "a" / "tiles"
    done = command("tune", "norm_fold", "loss", "--out", out)
    assert done.code == 0, done.err
    assert "2 of 2 classes have a faster tile" in done.out
    assert f"wrote loss.json, norm_fold.json into {out}" in done.out
    assert f"to use them: export MINIDL_TILES={out}" in done.out
    new, own = tile_tables.load(out / "loss.json"), launch.table("loss")
    assert new["interpreted"][0]["tile"]["BLOCK_N"] == 2 * own["interpreted"][0]["tile"]["BLOCK_N"]
    assert {t: r for t, r in new.items() if t != "interpreted"} == {t: r for t, r in own.items() if t != "interpreted"}
    again = command("tune", "loss", "--out", out)
    assert f"continuing from the tables in {out}" in again.out
    assert (
        tile_tables.load(out / "loss.json")["interpreted"][0]["tile"]["BLOCK_N"]
        == 4 * own["interpreted"][0]["tile"]["BLOCK_N"]
    )
    # Other families of this process are as before.
    assert launch.table("loss") == own


def test_the_variable_is_read_in_a_new_process(minidl, quick, command, tmp_path, monkeypatch):
    command("tune", "loss", "--out", tmp_path)
    monkeypatch.setenv("MINIDL_TILES", str(tmp_path))
    shown = minidl("tune", "loss", "--list").out
    assert shown.startswith("loss: all other shapes: N=524288 ")
    monkeypatch.setenv("MINIDL_TILES", str(tmp_path / "none"))
    done = minidl("tune", "loss", "--list")
    assert done.code == 2
    assert "MINIDL_TILES names no folder; make one with `minidl tune --out`" in done.err


def test_dry_run_writes_nothing(command, quick, tmp_path):
    done = command("tune", "loss", "--out", tmp_path / "tiles", "--dry-run")
    assert done.code == 0
    assert "1 of 1 classes have a faster tile" in done.out
    assert "wrote" not in done.out
    assert not (tmp_path / "tiles").exists()


def test_by_default_tables_go_to_the_users_configuration(command, quick, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = command("tune", "loss")
    assert done.code == 0
    assert files.usual_folder().is_relative_to(tmp_path)
    assert (files.usual_folder() / "loss.json").exists()


def test_write_is_for_the_package(command, quick, tmp_path, monkeypatch):
    copy = tmp_path / "tiles"
    copy.mkdir()
    for path in tile_tables.FOLDER.glob("*.json"):
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(tile_tables, "FOLDER", copy)
    done = command("tune", "loss", "--write")
    assert done.code == 0, done.err
    assert "export" not in done.out
    assert json.loads((copy / "loss.json").read_text())["interpreted"][0]["tile"]["BLOCK_N"] == 524288


def test_a_class_that_cannot_be_measured_fails_at_the_end(command, quick, tmp_path, monkeypatch):
    class Failing:
        def __init__(self, shape_class, check, device):
            raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr("minidl.tools.tuning.run.Searcher", Failing)
    done = command("tune", "loss", "--out", tmp_path)
    assert done.code == 1
    assert (
        "loss: all other shapes: could not be measured, so it keeps its tile (RuntimeError: out of memory)" in done.out
    )


def test_what_was_measured_is_kept_after_ctrl_c(command, quick, tmp_path, monkeypatch):
    from minidl.tools.tuning import run

    search_ = run._search

    def stopping(shape_class, *rest):
        if shape_class.family == "norm_fold":
            raise KeyboardInterrupt
        return search_(shape_class, *rest)

    monkeypatch.setattr(run, "_search", stopping)
    record = tmp_path / "r.json"
    done = command("tune", "loss", "norm_fold", "--out", tmp_path / "tiles", "--json", record)
    assert done.code == 130
    assert "interrupted" in done.err
    assert [each["family"] for each in json.loads(record.read_text())["classes"]] == ["loss"]
    assert [path.name for path in (tmp_path / "tiles").iterdir()] == ["loss.json"]


def test_an_output_that_fails_takes_no_other_along(command, quick, tmp_path, monkeypatch):
    from minidl.training.run_folder import files

    def full(path, *rest):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(files, "write_json", full)
    record, plot = tmp_path / "r.json", tmp_path / "sweep.svg"
    done = command("tune", "loss", "--out", tmp_path / "tiles", "--json", record, "--plot", plot)
    assert done.code == 1
    assert f"{record}: No space left on device" in done.err
    assert plot.exists()
    assert (tmp_path / "tiles" / "loss.json").exists()
    assert f"wrote loss.json into {tmp_path / 'tiles'}" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("sofmax",), "no kernel family's name contains 'sofmax'; known: attention_128, "),
        (("softmax", "--only", "float8"), "no class of these families has 'float8' in its name"),
        (("",), "no kernel family's name contains ''"),
        (("softmax", "--only", ""), "no class of these families has '' in its name"),
        (("loss", "--json", "x", "--plot", "x"), "--json and --plot name the same file, x: give two names"),
        (("loss", "--budget", "0"), "--budget is 0.0, expected seconds above 0"),
        (("loss", "--budget", "nan"), "--budget is nan, expected seconds above 0"),
        (("loss", "--out", "x", "--write"), "--write and --out cannot be combined"),
        (("loss", "--out", str(ROOT / "README.md")), "README.md is a file: give the name of a folder"),
        (("loss", "--out", str(ROOT / "README.md" / "tiles")), "cannot be created in"),
        (("loss", "--out", "x" * 300), "--out cannot be created: File name too long"),
        (("loss", "--json", "none/r.json"), "none is not a folder"),
        (("loss", "--plot", "."), "is a folder: give the name of a file"),
        (("loss", "--list", "--dry-run"), "--list cannot be combined with --dry-run"),
        (("loss", "--device", "tpu"), "--device is tpu, expected one of auto, cuda, cpu"),
    ],
)
def test_bad_arguments(command, arguments, said):
    done = command("tune", *arguments)
    assert done.code == 2, done.out
    assert said in done.err


def test_a_damaged_table_in_the_folder_is_told_before_the_work(command, quick, tmp_path):
    (tmp_path / "loss.json").write_text("{")
    done = command("tune", "loss", "--out", tmp_path)
    assert done.code == 2
    assert "loss.json: no tile table for this version" in done.err
    assert (tmp_path / "loss.json").read_text() == "{"


def test_a_configuration_that_cannot_be_written_is_told_before_the_work(command, quick, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    done = command("tune", "loss")
    assert done.code == 2
    assert (
        f"the folder of tables {files.usual_folder()} cannot be created in {tmp_path / 'file'}; give another"
        in done.err
    )
    assert command("tune", "loss", "--dry-run").code == 0


def test_a_user_without_a_home_is_told_to_name_a_folder(command, quick, monkeypatch):
    def homeless(*_, **__):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr("platformdirs.user_config_dir", homeless)
    done = command("tune", "loss")
    assert (done.code, done.err) == (
        2,
        "error: this user has no home folder for the tables: give a folder with --out\n",
    )


def test_a_folder_that_cannot_be_written(command, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    tmp_path.chmod(0o500)
    done = command("tune", "loss", "--out", tmp_path / "tiles")
    assert done.code == 2
    assert "cannot be created in" in done.err


def test_a_record_is_no_table_of_the_folder(command, quick, tmp_path):
    out = tmp_path / "tiles"
    assert command("tune", "gemm_sum", "--out", str(out)).code == 0
    before = (out / "gemm_sum.json").read_bytes()
    done = command("tune", "gemm_sum", "--out", str(out), "--json", str(out / "gemm_sum.json"))
    assert done.code == 2
    assert f"--json {out / 'gemm_sum.json'} exists and was not written by --json" in done.err
    assert (out / "gemm_sum.json").read_bytes() == before


def test_a_folder_that_is_a_link_to_nothing(command, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    done = command("tune", "gemm_sum", "--out", str(tmp_path / "link"))
    assert done.code == 2
    assert "is a broken link: give the name of a folder" in done.err


def test_sigterm_ends_it_as_ctrl_c_with_what_was_measured(tmp_path):
    record = tmp_path / "r.json"
    process = start("tune", "softmax", "--budget", 100, "--dry-run", "--json", record, folder=tmp_path)
    assert any(line.startswith("softmax") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert json.loads(record.read_text())["classes"]
