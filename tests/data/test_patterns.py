"""Patterns of words: those that are accepted take time proportional to the text."""

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minidl.data import DataError, Tfidf, TfidfOptions, patterns, vectorizer

ACCEPTED = [
    r"(?u)\b\w\w+\b", TfidfOptions().token_pattern, r"\w+", r"\S+", ".", "", r"\b", r"^\w+", r"(?P<word>\w+)",
    r"\b(\w\w+)\b", r"\b[a-zA-Z]{3,}\b", r"\b[^\d\W]+\b", r"(?i)\b[a-z]+\b", r"\b[a-z]{2,20}\b", "x{2,5}?", "[a-z]++",
    "(a|b+)", "(?:ab|ac+)", r"#\w+\b|\d{1,4}",
]  # fmt: skip
REFUSED = [
    "(a+)+$", "(a|a)*b", r"(?:\w+-)*\w+", r"\w+$", r"\w*\w*", r"\w+\w", r"[a-z]+\b", r"\b[\w-]+\b", r".*\b",
    "(?:a|b+)c", r"(?a:\w)+\b", r"(?a)\b[a\u00e9]+\b", r"(?=a+b)", "(?<=a)b", "(?>a+)b", r"(a)\1", "(a)?(?(1)b|c)",
    "(?:ab){2}", "(?:)*", "a{0,50}a{0,50}b", "a{2000}", "(?:a|bc)" * 20, "x" * 201, "(", "(a)(b)", "[[a]",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ACCEPTED)
def test_usual_patterns_are_accepted(pattern):
    assert TfidfOptions(token_pattern=pattern).token_pattern == pattern


@pytest.mark.parametrize("pattern", REFUSED)
def test_patterns_that_may_take_long_are_refused(pattern):
    with pytest.raises(ValueError, match=r"^bad TF-IDF option token_pattern: .*(expected|not a regular expression: )"):
        TfidfOptions(token_pattern=pattern)


def test_without_the_parser_the_usual_patterns_are_accepted(monkeypatch):
    monkeypatch.setattr(patterns, "_parser", None)
    for pattern in ACCEPTED[:2]:
        assert patterns.linear(pattern) == pattern
    with pytest.raises(ValueError, match="a pattern that some texts may keep busy"):
        patterns.linear(r"\w+")


def test_a_vocabulary_with_such_a_pattern_is_damaged():
    text = Tfidf.fit(["oil oil", "oil"]).to_json().replace(r'"(?u)[^\\W\\d_][^\\W_]+"', '"(a+)+$"')
    content = vectorizer.parse_json(text)
    checksum = vectorizer._checksum({name: content[name] for name in ("options", "terms", "idf")})
    with pytest.raises(DataError, match=r"^run is damaged: options.token_pattern is '\(a\+\)\+\$': a pattern that"):
        Tfidf.from_json(text.replace(content["sha256"], checksum), "run")


characters = st.sampled_from([r"\w", r"\d", r"\W", ".", "a", "b", "-", "[ab]", "[^a]", r"[\w-]", r"[^\W\d]", "[^-]"])
repeats = st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "??", "+?", "*+", "{0,9}"])
items = st.builds("".join, st.tuples(characters, repeats)) | st.sampled_from([r"\b", r"\B", "^", "$"])
several = st.recursive(
    st.lists(items, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.builds("{}|{}".format, inner, inner),
        st.builds("{}(?:{}){}{}".format, inner, inner, repeats, inner),
        st.builds(r"\b{}\b".format, inner),
        st.builds("{}({}){}".format, inner, inner, inner),
    ),
    max_leaves=4,
)
edges = st.sampled_from(["", r"\b", "a", "[ab]?"])
simple = st.builds("{}{}{}{}".format, edges, characters, st.sampled_from(["+", "*", "{2,}"]), edges)
TEXTS = [unit * (20_000 // len(unit)) + end for unit in ("a", "1", "!", "-", "ab", "a-") for end in "_a!\u00e9"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["", "(?a)", "(?i)", "(?s)", "(?m)"]), simple | several)
def test_an_accepted_pattern_takes_linear_time(flags, pattern):
    """A quadratic one takes seconds on one of these texts, an exponential one does not end."""
    try:
        patterns.linear(flags + pattern)
    except ValueError:
        assume(False)
    for text in TEXTS:
        before = time.process_time()
        for _ in re.finditer(flags + pattern, text):
            pass
        assert time.process_time() - before < 1, text[-3:]
