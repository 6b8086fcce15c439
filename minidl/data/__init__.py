"""Data sets by name or from the user's files, the TF-IDF vectorizers, and batches.

Read `loaders` first, then `records` (what a loader returns), `vectorizer`, `batches`, `images` and `image_batches`.
Importing this package is cheap: the modules that need scikit-learn, scipy or torch import them.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl.data.parsing import one_of, shorten
from minidl.data.records import (
    Augment,
    DataError,
    ImageDataset,
    Images,
    Pictures,
    Rows,
    TextDataset,
    Texts,
)

if TYPE_CHECKING:
    from minidl.data.batches import Batches, csr_from_scipy, epoch_order
    from minidl.data.corpus import read_labelled
    from minidl.data.files import read_texts
    from minidl.data.hashing import HashedTfidf
    from minidl.data.image_batches import ImageBatches
    from minidl.data.image_folders import read_labelled_pictures
    from minidl.data.loaders import to_device
    from minidl.data.pictures import read_pictures
    from minidl.data.schema import TableDataset, TableSchema
    from minidl.data.tables import read_features, read_rows
    from minidl.data.vectorizer import Tfidf, TfidfOptions

__all__ = [
    "IMAGE_DATA",
    "TABLE_DATA",
    "TEXT_DATA",
    "Augment",
    "Batches",
    "DataError",
    "HashedTfidf",
    "ImageBatches",
    "ImageDataset",
    "Images",
    "Pictures",
    "Rows",
    "TableDataset",
    "TableSchema",
    "TextDataset",
    "Texts",
    "Tfidf",
    "TfidfOptions",
    "csr_from_scipy",
    "epoch_order",
    "load_images",
    "load_table",
    "load_text",
    "read_features",
    "read_labelled",
    "read_labelled_pictures",
    "read_pictures",
    "read_rows",
    "read_texts",
    "to_device",
]

TEXT_DATA = {
    "docstrings": "docstrings of the Python standard library by chapter, about 7,000 texts in 22 classes; no download",
    "reuters-r8": "newswire by topic, 5,485 + 2,189 texts in 8 classes; downloaded or from MINIDL_DATA",
    "reuters-r52": "newswire by topic, 6,532 + 2,568 texts in 52 classes; downloaded or from MINIDL_DATA",
}
TABLE_DATA = {
    "diabetes": "disease progression of 442 patients from ten measurements (regression); no download",
}
IMAGE_DATA = {
    "digits": "scikit-learn's 1,797 handwritten digits of 8x8 pixels; no download",
    "mnist": "handwritten digits of 28x28 pixels, 60,000 + 10,000; downloaded or from MINIDL_DATA",
    "fashion-mnist": "clothes of 28x28 pixels, 60,000 + 10,000 in 10 classes; downloaded or from MINIDL_DATA",
}

_MODULES = {
    "loaders": "to_device",
    "batches": "Batches csr_from_scipy epoch_order",
    "corpus": "read_labelled",
    "files": "read_texts",
    "hashing": "HashedTfidf",
    "image_batches": "ImageBatches",
    "image_folders": "read_labelled_pictures",
    "pictures": "read_pictures",
    "schema": "TableDataset TableSchema",
    "tables": "read_features read_rows",
    "vectorizer": "Tfidf TfidfOptions",
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names.split()}


def load_text(name_or_path: str | Path, **options: Any) -> TextDataset:
    """Return a text classification task: a name of `TEXT_DATA`, or a data file of the user.

    Options of a file: `text_column`, `label_column`, `validation`, `test`, `split_seed`, see `corpus.load_corpus`.
    Options of the Reuters sets: `progress`, `cache`, `mirrors`, see `reuters.load_reuters`. `docstrings` takes
    `workers`.

    Raises DataError for an unknown name, an unsupported option, and data that cannot be used.
    """
    name = str(name_or_path)
    if name == "docstrings":
        return _call("docstrings", "load_docstrings", name, options)
    if name in TEXT_DATA:
        return _call("reuters", "load_reuters", name, options, name)
    check_text_file(name_or_path)
    return _call("corpus", "load_corpus", name, options, name_or_path).texts()


def check_text_file(name_or_path: str | Path) -> None:
    """Raise DataError unless it is a file or the name of a data set."""
    _check_path(name_or_path, TEXT_DATA, "text data")


def load_table(name_or_path: str | Path, **options: Any) -> TableDataset:
    """Return a table task: a name of `TABLE_DATA`, or a data file of the user.

    Options of a file: `target`, `task`, `ignore`, `missing`, `validation`, `test`, `split_seed`, see
    `tables.load_table_file`; `diabetes` takes the last three.

    Raises DataError for an unknown name, an unsupported option, and data that cannot be used.
    """
    name = str(name_or_path)
    if name in TABLE_DATA:
        return _call("tables", "load_diabetes", name, options)
    _check_path(name_or_path, TABLE_DATA, "table")
    return _call("tables", "load_table_file", name, options, name_or_path)


def load_images(name_or_path: str | Path, **options: Any) -> ImageDataset:
    """Return an image classification task: a name of `IMAGE_DATA`, or a folder with a folder of pictures per class.

    Options of a folder: `size`, `validation`, `test`, `split_seed`, `workers`, `cache`, see
    `image_folders.load_folder`. Options of `mnist` and `fashion-mnist`: `progress`, `cache`, `mirrors`, see
    `images.load_mnist`. `digits` takes none.

    Raises DataError for an unknown name, an unsupported option, and data that cannot be used.
    """
    name = str(name_or_path)
    if name == "digits":
        return _call("images", "load_digits", name, options)
    if name in IMAGE_DATA:
        return _call("images", "load_mnist", name, options, name)
    _check_path(name_or_path, IMAGE_DATA, "image data", "a folder that exists", "of a folder of class folders")
    if not Path(name_or_path).is_dir():
        raise DataError(f"{name_or_path} is a file; expected a folder with a folder of pictures per class")
    return _call("image_folders", "load_folder", name, options, name_or_path)


def _call(module: str, loader: str, name: str, options: dict[str, Any], *arguments: str | Path) -> Any:
    """Call the loader of a module with the options that are not None; commands pass all their options."""
    function = getattr(importlib.import_module(f"minidl.data.{module}"), loader)
    options = {key: value for key, value in options.items() if value is not None}
    names = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for key in options:
        if key not in names:
            raise DataError(f"{name} has no option {key!r}; its options are: {', '.join(names) or 'none'}")
    return function(*arguments, **options)


def _check_path(
    name_or_path: str | Path,
    names: dict[str, str],
    kind: str,
    expected: str = "a file that exists",
    path: str = "of a .csv, .tsv, .jsonl, .parquet or .arrow file",
) -> None:
    try:
        exists = Path(name_or_path).exists()
    except OSError:  # an invalid file name, or a folder without read permission
        exists = False
    if not exists:
        raise DataError(
            f"unknown {kind} {shorten(str(name_or_path))}: neither {one_of(names)} nor {expected}; "
            f"give a name or the path {path}"
        )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"minidl.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
