"""Read numbers in common notations: "$1,234.50", "12 %", "(5)", "1.234,5 €", "1 234".

All values of a column determine its one format. A comma before three digits may group thousands or be a decimal mark:
if no value of the column decides this, the decimal mark of the file applies, and a note says so.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from minidl.data.parsing import with_point
from minidl.data.saved import Checked

NUMBERS = ("auto", "plain", "point", "comma")  # number formats of a table, see `of_column`
PERCENT = "%"
_OTHER = {".": ",", ",": "."}
_LONGEST = 64  # characters of a number; longer values are texts
_MINUS = dict.fromkeys(map(ord, "\u2212\u2013\ufe63\uff0d"), "-")  # minus sign, en dash, and the wide ones
_PLAIN = {**_MINUS, 0xA0: " ", 0x2009: " ", 0x202F: " ", 0x2019: "'", 0xFF05: PERCENT}
_PARTS = re.compile(
    r"(?P<open>\(?)(?P<sign>[-+]?) *(?P<before>[^\w\s.,'()+-]?) *(?P<inner>[-+]?)(?P<digits>[\d.,][\d.,' ]*)"
    r"(?P<exponent>(?:[eE][-+]?\d+)?) *(?P<after>[^\w\s.,'()+-]?)(?P<close>\)?)"
)


def to_number(value: Any) -> float | None:
    """Return a finite float, or None for any other value; True and False are categories, not numbers."""
    if isinstance(value, bool) or (isinstance(value, str) and "_" in value):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        if isinstance(value, str) and (other := value.translate(_MINUS)) != value:
            return to_number(other)
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class NumberFormat(Checked):
    """The format of a column's numbers: the decimal mark, the separator of groups of digits ("": none), and the unit, a
    currency sign or a percent sign.

    "12%" is the number 12. A value may lack a currency sign, but not a percent sign.
    """

    decimal: Literal[".", ","] = "."
    group: Literal["", ",", ".", " ", "'"] = ""
    unit: Annotated[str, Field(max_length=1)] = ""

    def number(self, value: Any) -> float | None:
        """Return the number in a cell; None if it has no number of this format."""
        if not isinstance(value, str):
            return None if self.unit == PERCENT else to_number(value)
        parts = _parts(value)
        if parts is None:
            return None
        sign, unit, digits, exponent = parts
        lacks_currency = unit == "" and self.unit != PERCENT
        if not (unit == self.unit or lacks_currency) or not _digits(self.decimal, self.group).fullmatch(digits):
            return None
        plain = digits.replace(self.group, "") if self.group else digits
        return to_number(f"{sign}{plain.replace(self.decimal, '.')}{exponent}")

    @property
    def example(self) -> str:
        """Return a number of this format, for a message."""
        number = f"1{self.group}234{self.decimal}5"
        return number + self.unit if self.unit == PERCENT else self.unit + number


def of_column(values: Sequence[Any], numbers: str, decimal_comma: bool) -> tuple[NumberFormat | None, str | None]:
    """Return the format of most of a column's values, without missing values, and a note with an example.

    The format is None for plain numbers and for other values. `numbers` is one of NUMBERS; `decimal_comma` means that
    the file's decimal mark is the comma.
    """
    if numbers == "plain":
        return None, None
    plain = [to_number(with_point(value) if decimal_comma and isinstance(value, str) else value) for value in values]
    others = len(plain) - plain.count(None)
    all_plain = numbers == "auto" and others == len(values)
    if all_plain and not decimal_comma:
        return None, None
    texts = Counter(value for value in values if isinstance(value, str))
    if not texts:
        return None, None
    decimals = {"point": ".", "comma": ","}.get(numbers, ",." if decimal_comma else ".,")
    form, doubtful = _guess(texts, decimals)
    count = sum(form.number(value) is not None for value in values)
    # A single value in another format is a mistake.
    is_plain = all_plain or form == NumberFormat()
    least = others + 2 if numbers == "auto" else others
    if not all_plain and (2 * count <= len(values) or count < least):
        return None, None
    special = (text for text in texts if to_number(text) is None and form.number(text) is not None)
    example = doubtful or max(special, key=len, default=None)
    if example is None or (all_plain and doubtful is None):
        return None if is_plain else form, None
    number = plain[values.index(example)] if all_plain else form.number(example)
    note = f"{example!r} is read as {number:.15g}"
    for decimal in decimals:
        other = _guess(texts, decimal)[0].number(example)
        if doubtful is not None and other not in (None, number):
            note += f"; --numbers {'comma' if decimal == ',' else 'point'} reads it as {other:.15g}"
    return None if is_plain else form, note


def _guess(texts: Mapping[str, int], decimals: Sequence[str]) -> tuple[NumberFormat, str | None]:
    """Return the format that reads most of a column's texts, counted by their rows, and an ambiguous text or None.

    `decimals` are the possible decimal marks, the likelier one first. A text is ambiguous if another format that reads
    as many rows reads it as another number.
    """
    parts = {text: split for text in texts if (split := _parts(text)) is not None}
    units: Counter[str] = Counter()
    for text, (_, unit, _, _) in parts.items():
        units[unit] += texts[text]
    del units[""]
    unit = units.most_common(1)[0][0] if units else ""
    marks = {mark for _, _, digits, _ in parts.values() for mark in digits}
    best, most, numbers, doubtful = NumberFormat(), -1, dict[str, float | None](), None
    for decimal in decimals:
        for group in ("", *(mark for mark in (_OTHER[decimal], " ", "'") if mark in marks)):
            form = NumberFormat(decimal, group, unit)  # type: ignore[arg-type]
            read = {text: form.number(text) for text in parts}
            count = sum(texts[text] for text, number in read.items() if number is not None)
            if count > most:
                best, most, numbers, doubtful = form, count, read, None
            elif count == most and doubtful is None:
                both = (text for text, number in read.items() if number is not None and numbers[text] is not None)
                doubtful = next((text for text in both if read[text] != numbers[text]), None)

    return best, doubtful


def _parts(text: str) -> tuple[str, str, str, str] | None:
    """Return sign, unit, digits with their marks, and exponent of a number; None for any other text."""
    if len(text) > _LONGEST:
        return None
    match = _PARTS.fullmatch(text.translate(_PLAIN).strip())
    if match is None:
        return None
    bracket, signs, units = match["open"], match["sign"] + match["inner"], match["before"] + match["after"]
    if bool(bracket) != bool(match["close"]) or len(signs) + len(bracket) > 1 or len(units) > 1:
        return None
    if units and units != PERCENT and unicodedata.category(units) != "Sc":
        return None
    return "-" if bracket else signs, units, match["digits"].rstrip(), match["exponent"]


@cache
def _digits(decimal: str, group: str) -> re.Pattern[str]:
    integer = r"\d+"
    if group:
        mark = re.escape(group)
        # Groups of three digits, or in India of two before the last three.
        integer += rf"|[1-9]\d{{0,2}}(?:{mark}\d{{3}})+|[1-9]\d?(?:{mark}\d\d)+{mark}\d{{3}}"
    return re.compile(rf"(?:{integer})(?:{re.escape(decimal)}\d*)?|{re.escape(decimal)}\d+")
