"""Regular expressions that find words in time proportional to the text, whatever the text is.

Python's matcher tries one way after another: of `(a+)+$` their number doubles with every letter. Accepted are patterns
of single characters and repeats of them of which only the last has no upper bound, with nothing behind it that can
fail. Then at most MOST_STEPS are in vain wherever a word may begin, and the others read a word.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Any

try:
    from re import _parser  # type: ignore[attr-defined]
except ImportError:  # a Python that has another
    _parser = None

MOST_STEPS = 1000
MOST_CHARACTERS = 200
_KNOWN = (r"(?u)[^\W\d_][^\W_]+", r"(?u)\b\w\w+\b")  # accepted without a parser
_SINGLE = (["LITERAL"], ["NOT_LITERAL"], ["IN"], ["ANY"])
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
_EDGE = ("AT", "AT_BOUNDARY")

Item = tuple[str, Any]  # an operation of the parser's and its arguments


def linear(pattern: str) -> str:
    """The pattern, if it is matched in linear time. Raises ValueError for any other text."""
    if pattern in _KNOWN:
        return pattern
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"{len(pattern)} characters, expected at most {MOST_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if found.groups > 1:
        raise ValueError(f"{found.groups} groups, expected at most one; write the others as (?:...)")
    if not (_parser and _is_linear(_parser.parse(pattern), bool(found.flags & re.ASCII))):
        raise ValueError(
            "a pattern that some texts may keep busy for very long: expected characters and classes, alone or with "
            r"bounded repeats, then at most one unbounded repeat, which ends the pattern (or \b after \w+)"
        )
    return pattern


def _is_linear(parsed: Any, is_ascii: bool) -> bool:
    try:
        return sum(_steps(way, is_ascii) for way in _ways(parsed)) <= MOST_STEPS
    except ValueError:
        return False


def _ways(parsed: Iterable[Any]) -> list[list[Item]]:
    """The sequences of items that a pattern means, its groups and branches written out.

    Raises ValueError for many, and for an item that is neither a character, nor a repeat of one, nor a place.
    """
    ways: list[list[Item]] = [[]]
    for operation, given in parsed:
        name = str(operation)
        if name == "BRANCH":
            ends = [way for branch in given[1] for way in _ways(branch)]
        elif name == "SUBPATTERN" and not given[1] and not given[2]:  # no flags of its own
            ends = _ways(given[3])
        else:
            names = [str(inner) for inner, _ in given[2]] if name in _REPEATS else [name]
            if names not in _SINGLE and name != "AT":
                raise ValueError
            ends = [[(name, given)]]
        ways = [way + end for way in ways for end in ends]
        if sum(map(len, ways)) > MOST_STEPS:
            raise ValueError
    return ways


def _steps(way: list[Item], is_ascii: bool) -> int:
    """How many steps are at most in vain where a word may begin. Raises ValueError where nothing bounds them."""
    *before, (name, given) = way or [_EDGE]
    if before and (name, str(given)) == _EDGE and _is_unbounded(before[-1]):
        # Behind all of \w it cannot fail; behind some of it, it fails once in a word that begins with \b.
        begins = (before[0][0], str(before[0][1])) == _EDGE
        if _is_all_letters(before[-1]) or (begins and all(_is_letters(item, is_ascii) for item in before[1:])):
            way = before
    steps = 1
    for place, item in reversed(list(enumerate(way, 1))):
        low, high = item[1][:2] if item[0] in _REPEATS else (1, 1)
        if _is_unbounded(item):
            if place < len(way):
                raise ValueError
            high = low
        steps = high + (high - low + 1) * steps
    return steps


def _is_unbounded(item: Item) -> bool:
    return item[0] in _REPEATS and str(item[1][1]) == "MAXREPEAT"


def _characters(item: Item) -> list[tuple[str, Any]]:
    """What a single character, or that of a repeat, may be: the entries of its class."""
    name, given = item if item[0] not in _REPEATS else item[1][2][0]
    return [(str(kind), value) for kind, value in given] if str(name) == "IN" else [(str(name), given)]


def _is_all_letters(item: Item) -> bool:
    return [(kind, str(value)) for kind, value in _characters(item)] == [("CATEGORY", "CATEGORY_WORD")]


def _is_letters(item: Item, is_ascii: bool) -> bool:
    r"""Whether a character is always one of \w."""
    kinds = _characters(item)
    if kinds[0][0] == "NEGATE":
        return any(str(value) == "CATEGORY_NOT_WORD" for _, value in kinds)
    return all(
        str(value) in ("CATEGORY_WORD", "CATEGORY_DIGIT")
        or (kind == "LITERAL" and _is_letter(value, is_ascii))
        or (kind == "RANGE" and all(_is_letter(each, is_ascii) for each in range(value[0], value[1] + 1)))
        for kind, value in kinds
    )


def _is_letter(code: int, is_ascii: bool) -> bool:
    return (chr(code).isalnum() or chr(code) == "_") and not (is_ascii and code > 127)
