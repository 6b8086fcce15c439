"""Check that a regular expression finds words in time proportional to the length of every text.

Python's matcher backtracks: for `(a+)+$` the number of attempts doubles with every letter. Accepted are patterns of
single characters and their repeats, of which only the last is unbounded and no later item can fail. At each position,
at most MOST_STEPS then fail; the other steps read a word.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # a Python without this private module
    _parser = None

MOST_STEPS = 1000
MOST_CHARACTERS = 200
_ACCEPTED = (r"(?u)[^\W\d_][^\W_]+", r"(?u)\b\w\w+\b")  # accepted without a parser
_SINGLE = (["LITERAL"], ["NOT_LITERAL"], ["IN"], ["ANY"])
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_EDGE = ("AT", "AT_BOUNDARY")

Item = tuple[str, Any]  # an operation of the parser's and its arguments


def linear(pattern: str) -> str:
    """Return the pattern if it matches in linear time. Raises ValueError otherwise."""
    if pattern in _ACCEPTED:
        return pattern
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"{len(pattern)} characters, expected at most {MOST_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if compiled.groups > 1:
        raise ValueError(f"{compiled.groups} groups, expected at most one; write the others as (?:...)")
    if not (_parser and _is_linear(_parser.parse(pattern), bool(compiled.flags & re.ASCII))):
        raise ValueError(
            "a pattern that some texts may keep busy for very long: expected characters and classes, alone or with "
            r"bounded repeats, then at most one unbounded repeat, which ends the pattern (or \b after \w+)"
        )
    return pattern


def _is_linear(parsed: Any, is_ascii: bool) -> bool:
    try:
        return sum(_steps(items, is_ascii) for items in _sequences(parsed)) <= MOST_STEPS
    except ValueError:
        return False


def _sequences(parsed: Iterable[Any]) -> list[list[Item]]:
    """Return the sequences of items that a pattern matches, with its groups and branches expanded.

    Raises ValueError for too many items, and for one other than a character, a repeat of one, and an anchor.
    """
    sequences: list[list[Item]] = [[]]
    for operation, arguments in parsed:
        name = str(operation)
        if name == "BRANCH":
            ends = [items for branch in arguments[1] for items in _sequences(branch)]
        elif name == "SUBPATTERN" and not arguments[1] and not arguments[2]:  # without inline flags
            ends = _sequences(arguments[3])
        else:
            names = [str(inner) for inner, _ in arguments[2]] if name in _REPEATS else [name]
            if names not in _SINGLE and name != "AT":
                raise ValueError
            ends = [[(name, arguments)]]
        sequences = [items + end for items in sequences for end in ends]
        if sum(map(len, sequences)) > MOST_STEPS:
            raise ValueError
    return sequences


def _steps(items: list[Item], is_ascii: bool) -> int:
    """Return an upper bound of the steps that fail at one position. Raises ValueError if there is none."""
    *before, (name, arguments) = items or [_EDGE]
    if before and (name, str(arguments)) == _EDGE and _is_unbounded(before[-1]):
        # After \w+ the edge cannot fail; after a part of \w, it fails once in a word that begins with \b.
        begins = (before[0][0], str(before[0][1])) == _EDGE
        if _is_all_letters(before[-1]) or (begins and all(_is_letters(item, is_ascii) for item in before[1:])):
            items = before
    steps = 1
    for i, item in reversed(list(enumerate(items, 1))):
        low, high = item[1][:2] if item[0] in _REPEATS else (1, 1)
        if _is_unbounded(item):
            if i < len(items):
                raise ValueError
            high = low
        steps = high + (high - low + 1) * steps
    return steps


def _is_unbounded(item: Item) -> bool:
    return item[0] in _REPEATS and str(item[1][1]) == "MAXREPEAT"


def _characters(item: Item) -> list[tuple[str, Any]]:
    """Return the entries of the class of a single character, or of a repeated one."""
    name, arguments = item if item[0] not in _REPEATS else item[1][2][0]
    return [(str(kind), value) for kind, value in arguments] if str(name) == "IN" else [(str(name), arguments)]


def _is_all_letters(item: Item) -> bool:
    return [(kind, str(value)) for kind, value in _characters(item)] == [("CATEGORY", "CATEGORY_WORD")]


def _is_letters(item: Item, is_ascii: bool) -> bool:
    r"""Return whether a character always matches \w."""
    kinds = _characters(item)
    if kinds[0][0] == "NEGATE":
        return any(str(value) == "CATEGORY_NOT_WORD" for _, value in kinds)
    return all(
        str(value) in ("CATEGORY_WORD", "CATEGORY_DIGIT")
        or (kind == "LITERAL" and _is_letter(value, is_ascii))
        or (kind == "RANGE" and all(_is_letter(code, is_ascii) for code in range(value[0], value[1] + 1)))
        for kind, value in kinds
    )


def _is_letter(code: int, is_ascii: bool) -> bool:
    return (chr(code).isalnum() or chr(code) == "_") and not (is_ascii and code > 127)
