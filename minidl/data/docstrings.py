"""The embedded text data: docstrings of the Python standard library, labelled with their chapter.

The source files of the running Python are parsed, never imported. The label is the chapter of the Library Reference
that documents the module. Repeated texts count once; texts in two chapters are dropped. The split depends only on the
hash of the text, so a docstring is in the same split for every Python version.
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from minidl.data.chapters import chapter_of
from minidl.data.digests import content_hash
from minidl.data.parsing import is_utf8
from minidl.data.records import DataError, TextDataset, Texts
from minidl.data.split import TEST, TRAIN, VALIDATION, split_by_hash
from minidl.data.workers import Message, Workers

MIN_WORDS = 5  # shorter texts ("Return the value.") do not identify a chapter
MIN_CLASS = 60  # chapters with fewer texts have too few test texts
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_PART = 16  # files in a request to a worker
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For, ast.While)


def load_docstrings(library: Path | None = None, *, workers: Workers | None = None) -> TextDataset:
    """Return the docstrings of the running Python's standard library as a text classification task.

    `library` is the folder of the sources (default: the running Python's), which `workers` parse. CPython 3.11 to 3.13
    have about 7,000 texts in 22 classes, distributions without tkinter or idlelib fewer.

    Raises DataError if the sources are missing (a Python that ships only compiled files).
    """
    folder = Path(sysconfig.get_path("stdlib")) if library is None else Path(library)
    chapters: dict[str, set[str]] = {}
    sources = [(chapter, path) for module, path in _modules(folder) if (chapter := chapter_of(module)) is not None]
    modules = len(sources)
    for (chapter, _), texts in zip(sources, _parse_files([path for _, path in sources], workers), strict=True):
        for text in texts:
            chapters.setdefault(text, set()).add(chapter)
    single = {text: next(iter(names)) for text, names in chapters.items() if len(names) == 1}
    sizes = Counter(single.values())
    labels = sorted(chapter for chapter, size in sizes.items() if size >= MIN_CLASS)
    if len(labels) < 2:
        raise DataError(
            f"no docstrings to learn from in {folder}: this Python ships its library without sources; "
            "use a Python with a full standard library, or name a CSV, TSV or JSONL file"
        )
    index = {label: i for i, label in enumerate(labels)}
    texts = sorted((text for text in single if single[text] in index), key=lambda text: (content_hash(text), text))
    sides = split_by_hash(texts, validation=0.1, test=0.2)

    def part(side: int) -> Texts:
        members = [text for text, text_side in zip(texts, sides, strict=True) if text_side == side]
        return Texts(members, [index[single[text]] for text in members])

    source = {
        "name": "docstrings",
        "about": "docstrings of the Python standard library by chapter of the Library Reference",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "modules": modules,
        "texts": len(texts),
        "split": "hash of the text: 70 % train, 10 % validation, 20 % test",
    }
    return TextDataset("docstrings", labels, part(TRAIN), part(VALIDATION), part(TEST), source)


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Return the dotted name and the source file of each library module except tests, by name."""
    modules = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for name in names:
            if name.endswith(".py") and name.removesuffix(".py") not in _SKIPPED:
                file = Path(path, name)
                parts = file.relative_to(folder).with_suffix("").parts
                modules.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), file))
    yield from sorted(modules)


def _parse_files(paths: list[Path], workers: Workers | None) -> Iterator[list[str]]:
    """Return the docstrings of each file."""
    if workers is None:
        yield from (list(_docstrings(path)) for path in paths)
        return
    parts = (paths[start : start + _PART] for start in range(0, len(paths), _PART))
    for answer in workers.map(parse, (Message({"paths": [str(path) for path in part]}) for part in parts)):
        yield from answer.values["texts"]


def parse(message: Message) -> Message:
    """Return the docstrings of files. A worker's job."""
    return Message({"texts": [list(_docstrings(Path(path))) for path in message.values["paths"]]})


def _docstrings(path: Path) -> Iterator[str]:
    """Return the docstrings of at least MIN_WORDS words in a source file; none if the file does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stack: list[ast.AST] = [ast.parse(path.read_bytes())]
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    while stack:
        node = stack.pop()
        if isinstance(node, (ast.Module, *_SCOPES)):
            text = ast.get_docstring(node)
            if text and len(text.split()) >= MIN_WORDS and is_utf8(text):
                yield text
        # Only statement lists contain definitions; visiting expressions, too, would take four times as long.
        for name in ("body", "orelse", "handlers", "finalbody"):
            stack.extend(child for child in getattr(node, name, ()) if isinstance(child, (*_SCOPES, *_BLOCKS)))
