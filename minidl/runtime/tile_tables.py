"""Files of tile tables: the package's, or those in the folder that the environment variable MINIDL_TILES names.

A family without a file in that folder uses the package's table. The variable is read once, when this module is
imported. No other folder is searched, so without the variable results are the same in every process.
"""

import errno
import functools
import json
import os
from pathlib import Path
from typing import Any

from minidl.common import read_files

VARIABLE = "MINIDL_TILES"
FOLDER = Path(__file__).parent / "tiles"


def _chosen() -> str | None:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    try:
        return str(Path(folder).expanduser().absolute())
    except RuntimeError:  # ~ with an unknown user: not a folder
        return folder


CHOSEN = _chosen()
# The allowed values of sizes that are not block sizes: with another number of pieces, say, a product would be wrong.
FLAGS = {
    "PIECES": (1, 2, 4), "FLATTEN": (0, 1), "TAPS": (1, 3), "DOUBLE": (0, 1),
    "PER_PROCESSOR": (0, 1, 2, 4), "GROUP_M": (1, 4, 8, 16),
}  # fmt: skip
_PARTS = {"when", "tile", "warps", "stages", "or"}
_CURE = "delete it; `minidl tune` can then make a new one"

Table = dict[str, list[dict[str, Any]]]


class TableError(OSError):
    """An unusable folder or file of tile tables: the message says why, `filename` names it."""


def file_of(family: str) -> Path:
    """Return the file of a family's table. Raises TableError if MINIDL_TILES is not a folder."""
    if CHOSEN is not None:
        if not Path(CHOSEN).is_dir():
            raise TableError(
                errno.ENOTDIR,
                f"{VARIABLE} names no folder; make one with `minidl tune --out`, or unset {VARIABLE}",
                CHOSEN,
            )
        path = Path(CHOSEN) / f"{family}.json"
        if path.exists():
            return path
    return FOLDER / f"{family}.json"


@functools.cache
def read(family: str) -> Table:
    """Return a family's table. Raises FileNotFoundError for an unknown family, TableError for an unusable file."""
    path = file_of(family)
    return json.loads(path.read_text()) if path.parent == FOLDER else load(path)


def check() -> None:
    """Raise TableError if the folder of MINIDL_TILES or any file in it is unusable: call this before long work."""
    for path in FOLDER.glob("*.json"):
        if file_of(path.stem).parent != FOLDER:
            read(path.stem)


def load(path: Path) -> Table:
    """Return the table in a file outside the package. Raises TableError if this version's kernels cannot use it."""
    package = json.loads((FOLDER / path.name).read_text())
    try:
        table = json.loads(read_files.read_text(path))
        if not isinstance(table, dict) or table.keys() != package.keys():
            raise ValueError(f"expected an object with {', '.join(package)}")
        for target, rules in table.items():
            _check(target, rules, package[target], [rule for rules in package.values() for rule in rules])
    except OSError as error:
        why, cure = error.strerror, "make it a file that can be read, or delete it"
    except RecursionError:
        why, cure = "it is nested too deeply", _CURE
    except (ValueError, TypeError, AttributeError) as error:
        why, cure = str(error), _CURE
    else:
        return table
    raise TableError(errno.EINVAL, f"no tile table for this version ({why}); {cure}", str(path))


def _check(target: str, rules: Any, package: list[dict[str, Any]], everywhere: list[dict[str, Any]]) -> None:
    """Raise ValueError if rules differ from the package's in more than the values of conditions and sizes."""
    if not isinstance(rules, list):
        raise ValueError(f"{target} is {_short(rules)}, expected a list of rules")
    if bool(rules) != bool(package):
        raise ValueError(f"got {len(rules)} rules for {target}, the package has {len(package)}")
    conditions = {name for rule in everywhere for name in rule.get("when", {})}
    sizes = {frozenset(rule["tile"]) for rule in package}
    for rule in rules:
        if not isinstance(rule, dict) or not isinstance(rule.get("when", {}), dict):
            raise ValueError(f"the rule {_short(rule)} or its condition is no object")
        if not rule.keys() <= _PARTS or "tile" not in rule or frozenset(rule["tile"]) not in sizes:
            raise ValueError(f"the rule {_short(rule)} has other parts or sizes than the package's")
        for name, value in rule.get("when", {}).items():
            expected = (list, "a list") if name in ("dtype", "precision") else (int, "a whole number")
            if name not in conditions:
                raise ValueError(f"unknown condition {name[:40]}; known: {', '.join(sorted(conditions)) or 'none'}")
            if type(value) is not expected[0]:
                raise ValueError(f"the condition {name} is {_short(value)}, expected {expected[1]}")
        numbers = {**rule["tile"], "warps": rule.get("warps", 4), "stages": rule.get("stages", 3)}
        powers = [n for name, n in numbers.items() if name.startswith("BLOCK") or name == "warps"]
        are_integers = all(type(n) is int and 0 <= n < 2**31 for n in numbers.values())
        if not are_integers or any(n < 1 or n & (n - 1) for n in powers):
            raise ValueError(f"the rule {_short(rule)} has a size that is no power of two")
        for name, size in rule["tile"].items():
            allowed = {*FLAGS.get(name, ()), *(rule["tile"][name] for rule in package if name in rule["tile"])}
            if not name.startswith("BLOCK") and size not in allowed:
                raise ValueError(
                    f"{name} is {_short(size)} in the rule {_short(rule)}, expected one of {sorted(allowed)}"
                )
        if type(rule.get("or", True)) is not bool:
            raise ValueError(f'"or" is {_short(rule["or"])} in the rule {_short(rule)}, expected true or false')
    if rules and rules[-1].get("or"):
        raise ValueError(f'the last rule, {_short(rules[-1])}, says "or", but no rule follows')
    if rules and rules[-1].get("when"):
        raise ValueError(f"the last rule, {_short(rules[-1])}, has a condition; it must take all shapes left over")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
