"""Recognize files that minidl wrote by their content: minidl replaces and deletes no others.

The manifest of a finished run lists its files. All other files are JSON with the keys of their kind, or name minidl
near their beginning, as pages, pictures and tensor files do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 2**28  # bytes of JSON that is parsed
_HEAD = 4096  # bytes that are searched for a mark
SOFTWARE = "minidl train"  # the software that the pictures of a run name
DRAWN_BY = "minidl plot"  # the software that pictures of --plot name


@dataclass(frozen=True)
class Kind:
    """A kind of files: JSON objects with all keys of one entry of `keys`, one per line with `lines`; or files with one
    of `marks` near their beginning. A setting that names an output file is annotated with its kind.
    """

    keys: tuple[tuple[str, ...], ...] = ()
    marks: tuple[bytes, ...] = ()
    lines: bool = False

    def has(self, path: Path) -> bool:
        """Return whether a file is of this kind. An empty file is of every kind. Raises OSError."""
        size = path.stat().st_size
        with path.open("rb") as file:
            if self.marks or size == 0:
                head = file.read(_HEAD)
                return size == 0 or any(mark in head for mark in self.marks)
            if size > _LARGEST:
                return False
            raw = file.readline() if self.lines else file.read()
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and any(content.keys() >= {*each} for each in self.keys)


def _png(software: str) -> bytes:
    return b"tEXtSoftware\0" + software.encode()


SCORES = Kind((("task", "data", "source", "run"), ("task", "data", "model", "evaluator", "scores")))
RESULTS = Kind((("rows", "device", "torch", "triton"),))
MEASURED = Kind((("classes", "device", "target"), ("estimates", "rates", "rows")))
ESTIMATES = Kind((("device", "date", "source", "figures", "constants"),))
VERDICT = Kind((("minidl", "seconds", "compiled", "failures", "rows"),))
FINDINGS = Kind((("launches", "findings"),))
TRACE = Kind((("traceEvents", "minidl"),))
COMPARISON = Kind(marks=(b'<meta name="generator" content="minidl compare">',))
PLOT = Kind(marks=(_png(DRAWN_BY), b"<dc:title>minidl plot</dc:title>"))
MODEL = Kind(marks=(b'"format":"minidl generator"', b'"format":"minidl evaluator"'))
_PICTURE = Kind(marks=(_png("minidl"), SOFTWARE.encode()))
_TENSORS = Kind(marks=(b'{"__metadata__":{"run":"', b'{"__metadata__":{"sha256":"'))
# The kinds of a run's files, by name or else by suffix.
_OF_RUN = {
    "config.json": Kind((("format", "version", "kind", "config"),)),
    "environment.json": Kind((("minidl", "python", "torch", "threads"),)),
    "metrics.jsonl": Kind((("epoch", "steps", "seconds"),), lines=True),
    "manifest.json": Kind((("format", "version", "run", "files"),)),
    "calibration.json": Kind((("format", "version", "temperature"),)),
    "report.json": Kind((("task", "data", "epochs"),)),
    "report.txt": Kind(marks=(b"\n\nsource         ",)),
    "report.html": Kind(marks=(b'<meta name="generator" content="minidl train">',)),
    "evaluation.json": SCORES,
    "replaced": Kind((("folder", "name"),)),
    **dict.fromkeys(("last.json", "best.json"), Kind((("format", "tensors", "sha256", "progress"),))),
    **dict.fromkeys(("trace.json", "trace-evaluate.json", "trace-predict.json"), TRACE),
    ".safetensors": _TENSORS,
    ".png": _PICTURE,
    ".gif": _PICTURE,
}


def is_of_run(path: Path) -> bool:
    """Return whether the content of a file is that of a run's file of this name; False for documents of the data."""
    kind = _OF_RUN.get(path.name) or _OF_RUN.get(path.suffix)
    return kind is not None and path.is_file() and not path.is_symlink() and kind.has(path)
