"""Names, options and the cost of importing the package."""

import subprocess
import sys

import pytest

import minidl.data
from minidl.data import IMAGE_DATA, TABLE_DATA, TEXT_DATA, DataError, load_table, load_text


def test_an_unknown_name_lists_the_names():
    with pytest.raises(DataError) as caught:
        load_text("reuters")
    message = str(caught.value)
    assert all(name in message for name in TEXT_DATA)
    assert "nor a file that exists" in message
    with pytest.raises(DataError, match=r"unknown table 'iris\.csv': neither diabetes nor a file"):
        load_table("iris.csv")


def test_options_that_a_name_does_not_take():
    with pytest.raises(DataError, match="docstrings has no option 'text_column'; its options are: workers"):
        load_text("docstrings", text_column="x", label_column=None)
    with pytest.raises(
        DataError, match="diabetes has no option 'target'; its options are: validation, test, split_seed"
    ):
        load_table("diabetes", target="x")


def test_every_name_is_described_in_one_line():
    for text in [*TEXT_DATA.values(), *TABLE_DATA.values(), *IMAGE_DATA.values()]:
        assert 20 < len(text) < 110
        assert "\n" not in text


def test_every_public_name_exists():
    for name in minidl.data.__all__:
        assert getattr(minidl.data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        minidl.data.nothing  # noqa: B018


def test_importing_is_cheap():
    heavy = "{'torch', 'sklearn', 'scipy', 'numpy', 'rich', 'platformdirs', 'triton'}"
    code = f"import sys, minidl.data, minidl.data.reuters, minidl.data.files; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
