"""The built-in text dataset: docstrings of the Python standard library, labelled with their chapter.

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
from minidl.data.parsing import can_encode_utf8
from minidl.data.records import DataError, TextDataset, Texts
from minidl.data.split import TEST, TRAIN, VALIDATION, split_by_hash
from minidl.data.workers import Message, Workers

MIN_WORDS = 5  # shorter texts ("Return the value.") do not identify a chapter
MIN_CLASS = 60  # chapters with fewer texts have too few test texts
_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_FILES_PER_REQUEST = 16  # to a worker
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = (ast.If, ast.Try, ast.ExceptHandler, ast.With, ast.For, ast.While)


def load_docstrings(library: Path | None = None, *, workers: Workers | None = None) -> TextDataset:
    """Return the docstrings of the running Python's standard library as a text classification task.

    `library` is the folder of the sources (default: the running Python's); `workers` parse them. CPython 3.11 to 3.13
    have about 7,000 texts in 22 classes; distributions without tkinter or idlelib have fewer.

    Raises DataError if fewer than two chapters have enough texts: some Pythons ship only compiled files.
    """
    folder = Path(sysconfig.get_path("stdlib")) if library is None else Path(library)
    chapters_by_text: dict[str, set[str]] = {}
    sources = [(chapter, path) for module, path in _modules(folder) if (chapter := chapter_of(module)) is not None]
    modules = len(sources)
    for (chapter, _), texts in zip(sources, _parse_files([path for _, path in sources], workers), strict=True):
        for text in texts:
            chapters_by_text.setdefault(text, set()).add(chapter)
    chapter_by_text = {text: next(iter(names)) for text, names in chapters_by_text.items() if len(names) == 1}
    sizes = Counter(chapter_by_text.values())
    labels = sorted(chapter for chapter, size in sizes.items() if size >= MIN_CLASS)
    if len(labels) < 2:
        raise DataError(
            f"no docstrings to learn from in {folder}: it lacks source files of the standard library; "
            "use a Python with a full standard library, or your own CSV, TSV or JSONL file as data"
        )
    index = {label: i for i, label in enumerate(labels)}
    usable = (text for text, chapter in chapter_by_text.items() if chapter in index)
    texts = sorted(usable, key=lambda text: (content_hash(text), text))
    split_of_texts = split_by_hash(texts, validation=0.1, test=0.2)

    def texts_in(split: int) -> Texts:
        members = [text for text, text_split in zip(texts, split_of_texts, strict=True) if text_split == split]
        return Texts(members, [index[chapter_by_text[text]] for text in members])

    provenance = {
        "name": "docstrings",
        "about": "docstrings of the Python standard library by chapter of the Library Reference",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "modules": modules,
        "texts": len(texts),
        "split": "hash of the text: 70 % train, 10 % validation, 20 % test",
    }
    return TextDataset("docstrings", labels, texts_in(TRAIN), texts_in(VALIDATION), texts_in(TEST), provenance)


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Return the dotted name and the source file of each library module except tests, by name."""
    modules = []
    for path, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        for name in names:
            if name.endswith(".py") and name.removesuffix(".py") not in _SKIPPED:
                file = Path(path, name)
                dotted = ".".join(file.relative_to(folder).with_suffix("").parts)
                modules.append((dotted.removesuffix(".__init__"), file))
    yield from sorted(modules)


def _parse_files(paths: list[Path], workers: Workers | None) -> Iterator[list[str]]:
    """Return the docstrings of each file."""
    if workers is None:
        yield from (list(_docstrings(path)) for path in paths)
        return
    chunks = (paths[start : start + _FILES_PER_REQUEST] for start in range(0, len(paths), _FILES_PER_REQUEST))
    for answer in workers.map(parse, (Message({"paths": [str(path) for path in chunk]}) for chunk in chunks)):
        yield from answer.values["texts"]


def parse(message: Message) -> Message:
    """Return the docstrings of files; runs in a worker."""
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
            if text and len(text.split()) >= MIN_WORDS and can_encode_utf8(text):
                yield text
        # Only statement lists contain definitions; visiting expressions, too, would take four times as long.
        for name in ("body", "orelse", "handlers", "finalbody"):
            stack.extend(child for child in getattr(node, name, ()) if isinstance(child, (*_SCOPES, *_BLOCKS)))
