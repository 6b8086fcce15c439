"""Whether two run folders hold the same: every file, but for the times in them."""

import json
from collections.abc import Collection
from pathlib import Path

from minidl.common import timing
from minidl.training.report import metrics
from minidl.training.run_folder.files import read_json, read_tensors
from minidl.training.tasks import TASKS

# By file, the places of all numbers that come from a clock; [] stands for each entry of a list.
_CHECKPOINT = ("progress.seconds", "progress.epoch_seconds", "progress.history[].seconds")
TIMES = {
    "metrics.jsonl": ("[].seconds",),
    "report.json": (
        "seconds",
        "images_per_second",
        *(f"phases.{name}" for name in (*timing.NAMES, "total")),
        "memory.host_bytes",
        "memory.device_bytes",
    ),
    "checkpoints/last.json": _CHECKPOINT,
    "checkpoints/best.json": _CHECKPOINT,
}


def differences(one: Path, other: Path, leave_out: Collection[str] = ()) -> list[str]:
    """What is not the same in two run folders, a sentence each: tensors and pictures by their bytes, JSON by its values
    without TIMES, the reports for people by what report.json says. Files named in `leave_out` are not looked at."""
    found = []
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*")}.difference(leave_out) for folder in (one, other)
    ]
    found += [f"{name} is in {one} alone" for name in sorted(names[0] - names[1])]
    found += [f"{name} is in {other} alone" for name in sorted(names[1] - names[0])]
    for name in sorted(names[0] & names[1]):
        if (one / name).is_file():
            found += [f"{name}: {what}" for what in _file_differences(name, one / name, other / name)]
        elif not (other / name).is_dir():
            found.append(f"{name} is a folder in {one} alone")
    return found


def _file_differences(name: str, one: Path, other: Path) -> list[str]:
    if name == "report.txt":
        return [f"{path} is not what report.json says" for path in (one, other) if not _is_told(path)]
    if name == "report.html":
        return [f"{path} does not have the figures of report.json" for path in (one, other) if not _has_figures(path)]
    if one.read_bytes() == other.read_bytes():
        return []
    if name.endswith(".safetensors"):
        return _tensor_differences(one, other)
    if name == "manifest.json":
        return _value_differences("", *(_without_times_of_files(read_json(path)) for path in (one, other)))
    if name in TIMES:
        parse = _lines if name.endswith(".jsonl") else read_json  # without the seal, which is of the times, too
        values = [_without_times(parse(path), name) for path in (one, other)]
        return _value_differences("", *values)
    return ["its bytes differ"]


def _without_times_of_files(manifest: dict[str, object]) -> dict[str, object]:
    """The identity and the sums of files that have no times."""
    sums: dict[str, str] = manifest["files"]
    return {
        **manifest,
        "files": {name: sums[name] for name in sums if name not in (*TIMES, "report.txt", "report.html")},
    }


def _lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _has_figures(path: Path) -> bool:
    report, page = read_json(path.with_name("report.json")), path.read_text()
    figures = [metrics.format_score(name, report[name]) for name in metrics.TITLES if name in report]
    return all(f"<b>{figure}</b>" in page for figure in figures)


def _is_told(path: Path) -> bool:
    report = json.loads(path.with_name("report.json").read_text())
    try:
        return TASKS[report["kind"]].as_text(report) == path.read_text()
    except KeyError:  # it is told under report.json
        return False


def _tensor_differences(one: Path, other: Path) -> list[str]:
    left, right = read_tensors(one), read_tensors(other)
    found = [f"tensor {name} is in one alone" for name in sorted(left.keys() ^ right.keys())]
    for name in sorted(left.keys() & right.keys()):
        a, b = left[name], right[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            found.append(f"tensor {name} is {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        elif a.contiguous().numpy().tobytes() != b.contiguous().numpy().tobytes():
            found.append(f"tensor {name} differs in {int((a != b).sum())} of {a.numel()} values")
    return found or ["its tensors are equal and its bytes differ"]


def _without_times(value: object, name: str) -> object:
    for place in TIMES[name]:
        _drop(value, place.split("."))
    return value


def _drop(value: object, place: list[str]) -> None:
    """Put a word for the number at a place; anything else there stays, and is a difference."""
    first, *rest = place
    key = first.removesuffix("[]")
    if key:
        if key not in value:
            return
        if not rest and type(value[key]) in (int, float):
            value[key] = "a time"
            return
        value = value[key]
    if rest:
        for entry in value if first.endswith("[]") else [value]:
            _drop(entry, rest)


def _value_differences(place: str, one: object, other: object) -> list[str]:
    if type(one) is type(other) is dict:
        pairs = {name: (one.get(name, "nothing"), other.get(name, "nothing")) for name in sorted({*one, *other})}
    elif type(one) is type(other) is list and len(one) == len(other):
        pairs = dict(enumerate(zip(one, other, strict=True)))
    elif json.dumps(one) == json.dumps(other):  # tells -0.0 from 0.0, and 1 from 1.0
        return []
    else:
        return [f"{place} is {json.dumps(one)[:200]} and {json.dumps(other)[:200]}"]
    return [what for name, (a, b) in pairs.items() for what in _value_differences(f"{place}.{name}".lstrip("."), a, b)]
