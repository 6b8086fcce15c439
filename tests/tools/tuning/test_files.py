"""Tables on disk: the package's text again, what another version's are told, and the record of a sweep."""

import json

import pytest

from minidl.runtime import launch, tile_tables
from minidl.runtime.tile_tables import TableError
from minidl.tools.tuning import classes, files, plot, search
from minidl.tools.tuning.search import SearchResult, Trial
from minidl.training.process import environment


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of tables that is in use."""
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path))
    tile_tables.read.cache_clear()
    launch.forget()
    yield tmp_path
    monkeypatch.undo()
    tile_tables.read.cache_clear()
    launch.forget()


def changed(family="softmax", **sizes):
    table = launch.table(family)
    tile = launch.tile_of(table["sm_90"][0])
    return classes.with_tile(table, "sm_90", 0, launch.Tile({**tile.sizes, **sizes}, 2, 1))


def test_a_table_is_written_as_the_packages_are(tmp_path):
    for family in launch.families():
        path = files.write_table(tmp_path / "new", family, launch.table(family))
        assert json.loads(path.read_text()) == launch.table(family)
        assert tile_tables.load(path) == launch.table(family)
    own = (tile_tables.FOLDER / "softmax.json").read_text()
    assert files.as_text(launch.table("softmax")) == own


def test_a_folder_in_use_decides_and_the_package_has_the_rest(folder):
    before = environment.tile_hash()
    table = changed(BLOCK_M=4)
    files.write_table(folder, "softmax", table)
    tile_tables.read.cache_clear()
    assert launch.table("softmax") == table
    assert launch.table("gemm") == json.loads((tile_tables.FOLDER / "gemm.json").read_text())
    after = environment.tile_hash()
    assert after != before
    said = environment.changes({"tile_tables": before}, {"tile_tables": after})
    assert said == {"tile_tables": [before, after]}
    # Equal tables are equal, wherever they lie.
    (folder / "softmax.json").write_bytes((tile_tables.FOLDER / "softmax.json").read_bytes())
    assert environment.tile_hash() == before


def test_tuning_goes_on_from_what_a_folder_has(tmp_path):
    table = changed(BLOCK_M=4)
    files.write_table(tmp_path, "softmax", table)
    assert files.start_from(tmp_path, "softmax") == table
    assert files.start_from(tmp_path, "gemm") == launch.table("gemm")
    assert files.start_from(tile_tables.FOLDER, "softmax") == launch.table("softmax")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t: t.pop("sm_80"), "expected an object with interpreted, sm_90, sm_80"),
        (lambda t: t["sm_90"].clear(), "got 0 rules"),
        (lambda t: t["sm_90"][0]["tile"].pop("BLOCK_M"), "other parts or sizes"),
        (lambda t: t["sm_90"][0]["tile"].update(EVEN=1), "other parts or sizes"),
        (lambda t: t["sm_90"][0].update(note="fast"), "other parts or sizes"),
        (lambda t: t["sm_90"][0]["tile"].update(BLOCK_M=3), "no power of two"),
        (lambda t: t["sm_90"][0]["tile"].update(BLOCK_M="4"), "no power of two"),
        (lambda t: t["sm_90"][0]["tile"].update(BLOCK_M=0), "no power of two"),
        (lambda t: t["sm_90"][0].update(warps=5), "no power of two"),
        (lambda t: t["sm_90"][0]["when"].update(Z_max=3), "unknown condition Z_max; known: M_max, M_min"),
        (lambda t: t["sm_90"][0]["when"].update(N_max="32"), 'the condition N_max is "32", expected a whole number'),
        (lambda t: t.update(sm_90=3), "sm_90 is 3, expected a list of rules"),
        (lambda t: t["sm_90"][0].pop("tile"), "other parts or sizes"),
        (lambda t: t["sm_90"].append({}), "other parts or sizes"),
        (lambda t: t["sm_90"].append(None), "the rule null or its condition is no object"),
        (lambda t: t["sm_90"][0].update(when="N"), "the rule .* or its condition is no object"),
        (lambda t: t["sm_90"].pop(), "the last rule, .*, has a condition; it must take all shapes left over"),
        (lambda t: t["sm_90"][-1].update(when={"N_max": 4096}), "the last rule, .*, has a condition"),
        (lambda t: t["sm_90"][0].update({"or": 1}), '"or" is 1 in the rule .*, expected true or false'),
        (lambda t: t["sm_90"][-1].update({"or": True}), 'the last rule, .*, says "or", but no rule follows'),
    ],
)
def test_a_table_that_this_version_cannot_use_is_told(tmp_path, damage, said):
    table = json.loads((tile_tables.FOLDER / "softmax.json").read_text())
    damage(table)
    path = tmp_path / "softmax.json"
    path.write_text(json.dumps(table))
    with pytest.raises(TableError, match=said) as error:
        tile_tables.load(path)
    assert error.value.filename == str(path)


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"\xff\xfe", b"[" * 100_000, b"9" * 5000])
def test_what_is_no_table_is_told(tmp_path, content):
    (tmp_path / "softmax.json").write_bytes(content)
    with pytest.raises(TableError, match=r"no tile table for this version .*; delete it; `minidl tune`"):
        tile_tables.load(tmp_path / "softmax.json")


def test_a_folder_in_place_of_a_table_is_told(tmp_path):
    (tmp_path / "softmax.json").mkdir()
    with pytest.raises(TableError, match=r"\(Is a directory\); make it a file that can be read, or delete it"):
        tile_tables.load(tmp_path / "softmax.json")


def test_a_number_of_pieces_that_no_kernel_takes_is_told(tmp_path):
    table = json.loads((tile_tables.FOLDER / "gemm.json").read_text())
    table["interpreted"][0]["tile"]["PIECES"] = 4
    files.write_table(tmp_path, "gemm", table)
    assert tile_tables.load(tmp_path / "gemm.json") == table
    table["interpreted"][0]["tile"]["PIECES"] = 3
    files.write_table(tmp_path, "gemm", table)
    with pytest.raises(TableError, match=r"PIECES is 3 in the rule .*, expected one of \[1, 2, 4\]"):
        tile_tables.load(tmp_path / "gemm.json")


def test_every_table_of_a_folder_is_checked_at_once(folder):
    tile_tables.check()
    (folder / "notes.txt").write_text("no table")
    files.write_table(folder, "softmax", changed(BLOCK_M=4))
    tile_tables.check()
    (folder / "update.json").write_text("{")
    with pytest.raises(TableError) as error:
        tile_tables.check()
    assert error.value.filename == str(folder / "update.json")


def test_a_folder_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path / "none"))
    with pytest.raises(TableError, match="MINIDL_TILES names no folder"):
        tile_tables.file_of("softmax")


def test_names_of_devices_make_folders():
    assert files.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
    assert files.usual_folder().parts[-2] == "tiles"


def found(chosen=True):
    (shapes, *_) = classes.of_family("softmax", "interpreted")
    trials = [
        Trial(launch.Tile({"BLOCK_M": 2048, "BLOCK_N": 64}), search.TIMED, ms={"a": 0.5}, ratios={"a": 2.0}),
        Trial(launch.Tile({"BLOCK_M": 512, "BLOCK_N": 64}), search.TIMED, ms={"a": 2.0}, ratios={"a": 0.5}),
        Trial(launch.Tile({"BLOCK_M": 256, "BLOCK_N": 64}), search.WRONG, "a"),
    ]
    return SearchResult(shapes, trials, trials[0].tile if chosen else None, trials[0] if chosen else None, candidates=8)


def test_the_record_has_every_measurement_and_no_date():
    written = files.record([found(), found(chosen=False)])
    first, second = written["classes"]
    assert [trial["outcome"] for trial in first["trials"]] == ["timed", "timed", "wrong"]
    assert first["trials"][0]["ratio"] == 2.0
    assert (first["dropped"], first["candidates"]) == ({"wrong": 1}, 8)
    assert first["confirmed"]["ms"] == {"a": 0.5}
    assert second["chosen"] is None
    assert set(written) == {"device", "target", "torch", "triton", "classes"}


def test_the_picture_has_a_panel_for_each_class_with_the_present_tile():
    pytest.importorskip("matplotlib")
    warps = "" if launch.INTERPRETED else " warps=4 stages=3"
    drawn = plot.picture([found(), found(chosen=False)], "a device")
    assert drawn == plot.picture([found(), found(chosen=False)], "a device")
    assert drawn.count(b"<svg") == 1
    labels = [label for label, *_ in plot._bars(found())]
    assert labels == [f"M=2048 N=64{warps}", f"M=1024 N=64{warps} (present)", f"M=512 N=64{warps}"]
    assert plot._bars(found())[0][1:] == (0.5, "tab:green")
    assert b"<svg" in plot.picture([SearchResult(found().shape_class)], "a device")
