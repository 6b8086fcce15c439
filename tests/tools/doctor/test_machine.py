"""`minidl doctor`: each thing that may be missing is named, with what to do; the exit code says whether it matters."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from minidl.runtime import tile_tables
from minidl.tools.doctor import doctor, machine
from minidl.tools.doctor.machine import BAD, GOOD, NOTE, Check

ROOT = Path(__file__).parents[3]


def test_this_machine_passes(capsys):
    assert doctor() == 0
    shown = capsys.readouterr().out
    for name in ("Python", "torch", "triton", "numpy", "GPU", "kernels", "C compiler", "data", "disk", "self-test"):
        assert name in shown
    assert "All requirements are met." in shown


def test_something_bad_is_named_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(
        machine, "checks", lambda: iter([Check("disk", BAD, "[full]", "Free some."), Check("a", GOOD, "")])
    )
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "Needs attention: disk" in shown
    assert "[full]" in shown
    assert "Free some." in shown


def test_tile_tables_of_a_folder_are_named_and_checked(monkeypatch, tmp_path):
    assert machine._tiles() == []
    monkeypatch.setattr(tile_tables, "CHOSEN", str(tmp_path))
    tile_tables.read.cache_clear()
    assert [(check.status, check.text) for check in machine._tiles()] == [(NOTE, f"none in {tmp_path}")]
    (tmp_path / "pool.json").write_bytes((tile_tables.FOLDER / "pool.json").read_bytes())
    assert machine._tiles() == [Check("tile tables", GOOD, f"pool in {tmp_path}")]
    (tmp_path / "loss.json").write_text("{")
    (check,) = machine._tiles()
    assert check.status == BAD
    assert check.text.startswith(f"{tmp_path / 'loss.json'}: no tile table for this version")
    tile_tables.read.cache_clear()


def test_what_is_only_a_note_does_not_fail(monkeypatch):
    monkeypatch.setattr(machine, "checks", lambda: iter([Check("plots", NOTE, "missing", "Install it.")]))
    assert doctor() == 0


def test_a_check_that_raises_is_bad_and_the_others_still_run(monkeypatch):
    def _disk():
        raise PermissionError("no entry")

    monkeypatch.setattr(machine, "_disk", _disk)
    found = {check.name: check for check in machine.checks()}
    assert found["disk"].status == BAD
    assert "no entry" in found["disk"].text
    assert found["self-test float32"].status == GOOD


@pytest.mark.parametrize(
    ("version", "status", "advice"),
    [
        ("2.13.0+cpu", GOOD, ""),
        ("2.14.1", NOTE, "the tested version is 2.13.0"),
        ("2.10.0", BAD, "needs torch 2.11 or newer"),
        (None, BAD, "pip install"),
    ],
)
def test_versions(monkeypatch, version, status, advice):
    def find(name):
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(machine.metadata, "version", find)
    found = machine._version("torch")
    assert found.status == status
    assert advice in found.advice


def test_the_versions_are_those_of_the_project():
    pyproject, constraints = (ROOT / name for name in ("pyproject.toml", "constraints.txt"))
    for name, version in machine.NEEDED.items():
        assert f'"{name}>={version}' in pyproject.read_text()
    for name, version in machine.TESTED.items():
        assert f"\n{name}=={version}" in constraints.read_text()


def test_extras(monkeypatch):
    assert machine._extra("plots", ("json",), "nothing").status == GOOD
    found = machine._extra("plots", ("json", "no_such_package"), "no curves")
    assert (found.status, found.text) == (NOTE, "no_such_package missing: no curves")
    assert found.advice == "pip install no_such_package"


def test_every_extra_is_looked_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= {check.name for check in machine.checks()}
    extras = {"plots": machine.PLOTS, "arrow": machine.ARROW, "onnx": machine.ONNX, "notebooks": machine.NOTEBOOKS}
    for name, packages in extras.items():
        assert set(packages) <= {re.split(r"\W", package)[0] for package in extras[name]}


def test_data(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path / "nothing"))
    found = {check.name: check for check in machine._data()}
    assert found["MINIDL_DATA"].status == BAD
    monkeypatch.setenv("MINIDL_DATA", str(tmp_path))
    file = tmp_path / "reuters21578" / "reuters21578.tar.gz"
    file.parent.mkdir()
    file.touch()
    found = {check.name: check for check in machine._data()}
    assert (found["reuters"].status, found["reuters"].text) == (GOOD, str(file))
    assert "MINIDL_DATA" not in found


def test_little_disk_is_a_warning_and_a_closed_folder_is_bad(monkeypatch):
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert {check.status for check in machine._disk()} == {NOTE}
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert {check.status for check in machine._disk()} == {BAD}


def test_too_many_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1000")
    assert machine._threads().status == NOTE
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert machine._threads().status == GOOD


def test_wrong_results_are_bad(monkeypatch):
    from minidl import ops

    matmul = ops.matmul

    def off(a, b):
        product = matmul(a, b)
        product.data[0, 0] += 0.01
        return product

    off.__name__ = "matmul"
    monkeypatch.setattr(ops, "matmul", off)
    (found,) = machine._self_test()[:1]
    assert found.status == BAD
    assert "Rounding does not explain" in found.advice


def test_compiled_kernels_without_a_device_are_bad():
    code = "import sys; from minidl.tools.doctor import doctor; sys.exit(doctor())"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "Unset TRITON_INTERPRET" in done.stdout


def test_a_long_path_stays_in_one_piece(monkeypatch, capsys):
    path = "/a_folder_with_a_long_name" * 8
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(machine, "checks", lambda: iter([Check("reuters", NOTE, f"not at {path}", f"Make {path}.")]))
    assert doctor() == 0
    assert capsys.readouterr().out.count(path) == 2


def test_the_names_of_the_kernels_are_those_that_are_compiled():
    code = """
import importlib, pkgutil
from triton.runtime.jit import JITFunction
from minidl import kernels
from minidl.tools.doctor import jobs
found = [
    f"{module.__name__}:{name}"
    for info in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")
    for module in [importlib.import_module(info.name)]
    for name, value in vars(module).items()
    if isinstance(value, JITFunction) and name.endswith("_kernel") and value.__module__ == module.__name__
]
assert sorted(jobs.kernels()) == sorted(found), {*jobs.kernels()} ^ {*found}
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_doctor_loads_neither_torch_nor_rich():
    code = "import sys, minidl.tools.doctor; sys.exit(bool({'torch', 'triton', 'rich', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
