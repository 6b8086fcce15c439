"""Split a text into terms: words and runs of neighboring words, or runs of characters.

The terms are those of scikit-learn's CountVectorizer (tested), except that texts are first normalized to NFC, and a
combining mark counts as the character that it marks, so that words stay in one piece in all scripts.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from minidl.common import import_lock

_JOINERS = "\u200c\u200d"  # zero width; in Persian, Hindi or Bangla they change the shape of the letters around them
_LAST_OF_PLANE = "\uffff"
_SPACES = re.compile(r"\s\s+")

Terms = Callable[[str], list[str]]


@dataclass(frozen=True)
class Analyzer:
    """The options that determine the terms of a text; see `TfidfOptions`."""

    token_pattern: str
    lowercase: bool
    stop_words: str | None
    ngram_max: int
    ngram_min: int = 1
    unit: str = "word"
    nfc: bool = True

    def function(self) -> Terms:
        """Return the function from a text to its terms, one per occurrence."""
        terms = {"word": self._words, "char": self._characters, "char_wb": self._characters_of_words}[self.unit]()
        lower, normal = self.lowercase, self.nfc

        def of_text(text: str) -> list[str]:
            if lower:
                text = text.lower()
            return terms(_normal(text, lower) if normal and not text.isascii() else text)

        return of_text

    def _words(self) -> Terms:
        pattern, least, most = re.compile(self.token_pattern), self.ngram_min, self.ngram_max
        find, nfc = pattern.findall, self.nfc
        stops: frozenset[str] = frozenset()
        if self.stop_words is not None:
            with import_lock.LOCK:
                from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
            stops = ENGLISH_STOP_WORDS

        def words(text: str) -> list[str]:
            if nfc and not text.isascii():
                bases, marks = _without_marks(text)
                if marks:
                    spans = (match.span(pattern.groups) for match in pattern.finditer(bases))
                    return [text[start:end] for start, end in spans]
            return find(text)

        def runs(text: str) -> list[str]:
            tokens = [word for word in words(text) if word not in stops]
            terms = list(tokens) if least == 1 else []
            for size in range(max(2, least), min(most, len(tokens)) + 1):
                terms += [" ".join(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
            return terms

        return runs if stops or most > 1 else words

    def _characters(self) -> Terms:
        least, most = self.ngram_min, self.ngram_max

        def runs(text: str) -> list[str]:
            text = _SPACES.sub(" ", text)
            sizes = range(least, min(most, len(text)) + 1)
            return [text[start : start + size] for size in sizes for start in range(len(text) - size + 1)]

        return runs

    def _characters_of_words(self) -> Terms:
        least, most = self.ngram_min, self.ngram_max

        def runs(text: str) -> list[str]:
            terms: list[str] = []
            for word in text.split():
                padded = f" {word} "
                for size in range(least, most + 1):
                    terms += [padded[start : start + size] for start in range(max(1, len(padded) - size + 1))]
                    if size >= len(padded):  # a short word counts once
                        break
            return terms

        return runs


def _normal(text: str, lower: bool) -> str:
    """Return the text in NFC. In lower case, an i with a second dot, Python's lower case of a dotted I, is an i."""
    return unicodedata.normalize("NFC", text.replace("i\u0307", "i") if lower else text)


def _without_marks(text: str) -> tuple[str, int]:
    """Return the text with combining marks, and joiners before letters, replaced by the character before them, and the
    number of matches."""

    def bases(match: re.Match[str]) -> str:
        run, (start, end) = match[0], match.span()
        base, bases = text[start - 1] if start else " ", []
        if run[-1] not in _JOINERS and max(run) <= _LAST_OF_PLANE:
            return base * len(run)
        for char, after in zip(run, text[start + 1 : end + 1] + " ", strict=False):
            if not (_is_mark(char) or (char in _JOINERS and (after.isalnum() or _is_mark(after)))):
                base = char
            bases.append(base)
        return "".join(bases)

    return _marks().subn(bases, text)


@functools.cache
def _marks() -> re.Pattern[str]:
    """Return a pattern for runs of combining marks, joiners, and characters of more than 16 bits, which are checked one
    by one: a class with some of them takes ten times as long."""
    marks = "".join(filter(_is_mark, map(chr, range(0x300, ord(_LAST_OF_PLANE)))))
    return re.compile(f"[{marks}{_JOINERS}\U00010000-\U0010ffff]+")


def _is_mark(char: str) -> bool:
    return unicodedata.category(char)[0] == "M"
