"""What a result depends on is described, and a difference is told by name."""

import sys
import types

import pytest

from minidl.runtime import launch
from minidl.training.process import environment


@pytest.fixture
def described():
    return environment.describe(1)


def test_everything_that_decides_the_bits_is_described(described):
    assert set(environment.DECIDING) <= described.keys()
    assert described["float32_precision"] == launch.float32_precision()
    assert described["target"] == launch.target()
    assert described["python"] == sys.version.split()[0]
    for name in environment.DECIDING:
        assert described[name] not in (None, ""), name


def test_a_description_is_the_same_again(described):
    assert environment.changes(described, environment.describe(1)) == {}


@pytest.mark.parametrize("name", environment.DECIDING)
def test_each_difference_is_told(described, name):
    assert environment.changes({**described, name: "other"}, described) == {name: ["other", described[name]]}


@pytest.mark.parametrize("name", ["platform", "driver", "safetensors"])
def test_what_changes_no_result_is_not(described, name):
    assert environment.changes({**described, name: "other"}, described) == {}


def test_what_an_older_description_lacks_is_not_known_to_differ(described):
    new = ("libc", "processor", "blas", "float32_precision")
    assert environment.changes({name: value for name, value in described.items() if name not in new}, described) == {}


def test_the_precision_of_products_is_described(described):
    before = launch.float32_precision()
    launch.set_float32_precision("tf32")
    try:
        assert environment.changes(described, environment.describe(1)) == {"float32_precision": [before, "tf32"]}
    finally:
        launch.set_float32_precision(before)


def test_each_blas_is_described_with_its_threads(monkeypatch):
    """Not as they were asked for, but as they are."""
    libraries = [
        {"user_api": "openmp", "internal_api": "openmp", "version": None, "num_threads": 8},
        {"user_api": "blas", "internal_api": "mkl", "version": "2025.1", "num_threads": 4},
        {"user_api": "blas", "internal_api": "openblas", "version": "0.3", "architecture": "Zen", "num_threads": 2},
    ]
    monkeypatch.setitem(sys.modules, "threadpoolctl", types.SimpleNamespace(threadpool_info=lambda: libraries))
    assert environment.blas() == "mkl 2025.1 x 4, openblas 0.3 Zen x 2"


def test_a_checksum_is_shown_by_its_beginning():
    assert environment.shown("0123456789abcdef" * 4) == "0123456789ab"
    assert environment.shown("2.13.0+cpu") == "2.13.0+cpu"
    assert environment.shown(None) == "none"
