"""The embedded docstrings: enough of them, stable, each in one split only."""

import platform
import sys
from pathlib import Path

import pytest

from minidl.data import DataError, docstrings, load_text
from minidl.data.chapters import CHAPTERS, chapter_of
from minidl.data.split import TEST, VALIDATION, split_by_hash


@pytest.fixture(scope="module")
def data():
    return load_text("docstrings")


def test_there_are_thousands_in_about_twenty_classes(data):
    total = len(data.train) + len(data.validation) + len(data.test)
    assert 4500 < total < 9000
    assert 18 <= len(data.labels) <= 26
    assert data.labels == sorted(data.labels)
    assert data.source["python"] == f"{platform.python_implementation()} {platform.python_version()}"
    assert data.source["texts"] == total


def test_no_text_is_in_two_splits_or_twice_in_one(data):
    texts = data.train.texts + data.validation.texts + data.test.texts
    assert len(set(texts)) == len(texts)


def test_every_class_is_in_every_split(data):
    for part in (data.train, data.validation, data.test):
        assert set(part.labels) == set(range(len(data.labels)))


def test_splits_follow_the_hash_of_the_text(data):
    assert set(split_by_hash(data.test.texts, 0.1, 0.2)) == {TEST}
    assert set(split_by_hash(data.validation.texts, 0.1, 0.2)) == {VALIDATION}


def test_a_known_docstring_has_its_chapter(data):
    import gzip
    import inspect

    text = inspect.cleandoc(gzip.GzipFile.__init__.__doc__)
    found = [
        data.labels[label]
        for part in (data.train, data.validation, data.test)
        for its_text, label in zip(part.texts, part.labels, strict=True)
        if its_text == text
    ]
    assert found == ["compression"]


def test_sources_are_parsed_and_never_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(docstrings, "MIN_CLASS", 2)
    words = "one two three four five"
    trap = "raise SystemExit('imported')\n"
    (tmp_path / "gzip.py").write_text(f'"""{words} gzip"""\n{trap}def f():\n    """{words} f"""\n')
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text(f'"""{words} json"""\n{trap}')
    (tmp_path / "json" / "tool.py").write_text(
        f"try:\n    class A:\n        '''{words} A'''\n        if 1:\n"
        f"            async def g():\n                '''{words} g'''\n"
        "except Exception:\n    pass\n"
    )
    (tmp_path / "html.py").write_text(f'"""{words} html"""\n')  # a class of one text is left out
    (tmp_path / "csv.py").write_text("def broken(:\n")
    (tmp_path / "ast.py").write_bytes(b"\xff\0")
    (tmp_path / "re.py").write_text(f'"""{words} A"""\n')  # also in json: ambiguous, dropped
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "gzip.py").write_text(f'"""{words} test"""\n')
    (tmp_path / "heapq.py").write_text('"\\ud800 two three four five"\n')
    before = set(sys.modules)
    data = docstrings.load_docstrings(tmp_path)
    assert set(sys.modules) == before
    texts = {
        (its_text, data.labels[label])
        for part in (data.train, data.validation, data.test)
        for its_text, label in zip(part.texts, part.labels, strict=True)
    }
    assert texts == {
        (f"{words} gzip", "compression"),
        (f"{words} f", "compression"),
        (f"{words} json", "internet data"),
        (f"{words} g", "internet data"),
    }


def test_a_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"no docstrings to learn from in .*use a Python with a full standard library"):
        docstrings.load_docstrings(Path(tmp_path))


def test_chapters():
    assert chapter_of("gzip") == "compression"
    assert chapter_of("asyncio.events") == "networking"
    assert chapter_of("no_such_module.sub") is None
    listed = set(CHAPTERS) - {"os.path"}
    public = {name for name in sys.stdlib_module_names if not name.startswith("_")}
    assert len(public & listed) > 150
