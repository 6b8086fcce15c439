"""Names are nouns for things, verbs for functions, adjectives for flags.

`docs/glossary.md` has the terms that are minidl's own; all others are those of PyTorch, Triton and cuDNN.
"""

import ast
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import minidl

PACKAGE = Path(minidl.__file__).parent
# Participles and adverbs that say nothing about a value: name the thing. With each, the uses that are left: parameters
# of kernels and keys of the cost model, which stored tables and kernel lists also have (apart, beside, turned, whole),
# a form of convolutions (held), fields of stored or public classes (found, kept, place), `ast.walk`.
VAGUE = {
    "again": 0, "apart": 2, "asked": 0, "beside": 10, "found": 5, "given": 0, "held": 0, "kept": 10, "known": 0,
    "made": 0, "own": 0, "place": 21, "said": 0, "taken": 0, "there": 0, "told": 0, "turned": 0, "walk": 1, "walks": 0,
    "wanted": 0, "whole": 6,
}  # fmt: skip
# Words of earlier versions, and the terms that replaced them.
RETIRED = {
    "Halves": "ConcatPair", "Later": "Deferred", "blind": "batch_invariant",
    "handed": "fused_statistics", "kin": "the subject of the operation", "later": "deferred", "pace": "tile_throughput",
    "standin": "fake_torch",
}  # fmt: skip


def names() -> dict[str, Counter[str]]:
    """Return how often each file uses each name, without leading and trailing underscores."""
    uses: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("id", "attr", "arg", "name", "asname"):
                if isinstance(name := getattr(node, field, None), str):
                    uses[name.strip("_")][str(path.relative_to(PACKAGE))] += 1
    return uses


@pytest.fixture(scope="module")
def used():
    return names()


@pytest.mark.parametrize("word", VAGUE)
def test_vague_words_are_no_names(used, word):
    files = used.get(word, Counter())
    assert files.total() == VAGUE[word], f"{word}: name the thing; the uses: {dict(files)}"


@pytest.mark.parametrize("word", RETIRED)
def test_retired_terms_do_not_return(used, word):
    assert not used.get(word), f"{word} is now {RETIRED[word]}"
