"""Constants of estimates: files, their errors, devices without a file, and equal choices in every process."""

import datetime as dt
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from minidl.kernels.conv import plan as plans
from minidl.kernels.gemm import choice
from minidl.runtime import launch, tile_tables
from minidl.runtime.cost_model import devices, schema, selection
from minidl.tools.tuning import drawn, drawn_conv

H100 = devices.FOLDER / "nvidia-h100.json"
FIGURES = schema.Figures(**json.loads(H100.read_text())["figures"])
# Properties from the driver (kHz, bits, bytes), then from the data sheet: TB/s, TFLOPS of float16 with float32 sums.
SHEETS = {
    "NVIDIA A100-SXM4-40GB": ((8, 0), 108, 1_410_000, 1_215_000, 5120, 41_943_040, 1.555, 312),
    "NVIDIA L4": ((8, 9), 58, 2_040_000, 6_251_000, 192, 50_331_648, 0.300, 121),
    "NVIDIA GeForce RTX 4090": ((8, 9), 128, 2_520_000, 10_501_000, 384, 75_497_472, 1.008, 165),
    "NVIDIA H100 PCIe": ((9, 0), 114, 1_755_000, 1_593_000, 5120, 52_428_800, 2.039, 820),
}


def properties_of(name):
    (major, minor), processors, clock, memory, bus, cache, *_ = SHEETS[name]
    return SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=processors, clock_rate=clock,
        memory_clock_rate=memory, memory_bus_width=bus, L2_cache_size=cache,
    )  # fmt: skip


def test_every_device_of_the_package_has_constants_with_their_date_and_source():
    for path in devices.FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        assert isinstance(devices.of_file(path), schema.Constants)
        assert dt.date.fromisoformat(content["date"])
        assert content["source"].endswith(".")
    assert {devices.usual(target).stem for target in launch.TARGETS} <= {p.stem for p in devices.FOLDER.glob("*.json")}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content.update(note=3), "unknown: note"),
        (lambda content: content["constants"].pop("copy"), r"constants is \[.*, expected launch, copy, reached"),
        (lambda content: content["constants"].update(copy=0), "copy is 0, expected a number above 0"),
        (lambda content: content["constants"].update(copy=True), "copy is true, expected a number above 0"),
        (lambda content: content["constants"].update(copy=float("nan")), "copy is NaN, expected a number above 0"),
        (
            lambda content: content["constants"]["tiles"].update({"64x64": [2]}),
            r"tiles, 64x64 is \[2\], expected 2 numbers",
        ),
        (lambda content: content["constants"]["tiles"].update({"64x64": [1.5, 1]}), "expected a number above 0"),
        (lambda content: content["constants"].update(steps=3), "steps is 3, expected an object"),
        (
            lambda content: content.update(base="nvidia-h100", constants={"steps": {"fastest": 1}}),
            "steps has fastest, known",
        ),
        (lambda content: content.update(base="../h100"), "the base '../h100' is no device of the package"),
        (lambda content: content.update(figures={}), None),
    ],
)
def test_a_file_that_this_version_cannot_use_is_told_in_one_line(tmp_path, damage, message):
    content = json.loads(H100.read_text())
    damage(content)
    path = tmp_path / devices.NAME
    path.write_text(json.dumps(content))
    if message is None:  # figures are for scaling alone
        assert devices.of_file(path) == devices.of_file(H100)
        return
    with pytest.raises(tile_tables.TableError, match=message) as error:
        devices.of_file(path)
    assert error.value.filename == str(path)
    assert error.value.strerror.endswith("delete it; `minidl tune --estimates` can then make a new one")
    assert "\n" not in error.value.strerror


@pytest.mark.parametrize("content", [b"", b"{", b"3", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_file_of_estimates_is_told_before_the_work(tmp_path, monkeypatch, content):
    (tmp_path / devices.NAME).write_bytes(content)
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path))
    with pytest.raises(tile_tables.TableError, match="no estimates for this version"):
        devices.check()


@pytest.mark.parametrize("name", SHEETS)
def test_a_device_without_a_file_has_constants_by_its_data_sheet(name):
    figures = devices.figures_of(properties_of(name), "sm_90")
    *_, memory, tensor = SHEETS[name]
    assert figures.memory / 1e12 == pytest.approx(memory, rel=0.02)
    assert figures.tensor * figures.clock * figures.processors / 1e12 == pytest.approx(tensor, rel=0.02)
    constants = devices.scaled(devices.of_file(H100), FIGURES, figures)
    assert 0.5 * memory * 1e6 < constants.copy < 1.4 * memory * 1e6
    assert 0.5 * tensor * 1e6 < constants.products["float16"] < tensor * 1e6
    # A product takes about as much longer as tensor cores are slower, one bound by memory as that is.
    tile = launch.Tile({"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64})
    for shape, slower in (
        (choice.Shape(8192, 8192, 8192), 989 / tensor),
        (choice.Shape(2**20, 64, 64), 3.352 / memory),
    ):
        times = []
        for constants_, processors in ((devices.of_file(H100), 132), (constants, figures.processors)):
            with selection.use(constants_):
                times.append(choice.microseconds("gemm", shape, tile, 1, processors))
        assert 0.6 * slower < times[1] / times[0] < 2 * slower


def test_boards_of_one_name_with_other_memory_or_fewer_multiprocessors_are_other_devices():
    name = "NVIDIA H100 PCIe"
    assert devices.file_of("NVIDIA H100 80GB HBM3", FIGURES) == H100
    assert devices.file_of("NVIDIA H1000", FIGURES) is None
    assert devices.file_of(name, devices.figures_of(properties_of(name), "sm_90")) is None


CHOICES = """
import torch
from minidl.kernels.conv import plan as plans
from minidl.runtime.cost_model import selection
from minidl.tools.tuning import drawn, drawn_conv
lines = []
for target, processors in (("sm_90", 132), ("sm_80", 108), ("interpreted", 1)):
    lines.append(selection.digest(target))
    for index in range(8):
        shape = drawn.draw("conv", 5, index)
        for direction in drawn_conv.DIRECTIONS:
            lines.append(plans.explain(drawn_conv.problem(shape, direction, torch.float16, target, processors)))
"""


def test_the_choice_is_the_same_in_another_process(tmp_path):
    """Whatever a folder of MINIDL_TILES has for a device that is not here; for one that is, that is what it has."""
    constants = selection.of("sm_90" if launch.INTERPRETED else launch.device_target())
    (tmp_path / devices.NAME).write_text(json.dumps({"constants": schema.as_json(constants)}))
    namespace = {}
    exec(CHOICES, namespace)
    env = {**os.environ, "PYTHONHASHSEED": "1", "MINIDL_TILES": str(tmp_path)}
    script = f"{CHOICES}print('\\n'.join(lines))"
    other = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True, text=True)
    assert other.stdout == "\n".join(namespace["lines"]) + "\n"


def test_other_constants_make_other_choices_only_while_they_are_used():
    problem = drawn_conv.problem(drawn.draw("conv", 5, 1), "forward", torch.float16, "sm_90", 132)
    before = plans.plan(problem).microseconds
    slower = selection.of("sm_90")._replace(launch=1e4, copy=1.0)
    with selection.use(slower):
        assert plans.plan(problem).microseconds > 10 * before
        assert selection.of("sm_80") is slower
    assert plans.plan(problem).microseconds == before
