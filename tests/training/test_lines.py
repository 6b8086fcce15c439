"""Lines of answers: those of the answers as JSON, made here or by processes."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minidl.data.parsing import encoded
from minidl.data.workers import Workers
from minidl.training.loop.targets import Classification
from minidl.training.prediction import json_lines

_LABELS = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), min_size=2, max_size=6, unique=True)


@settings(max_examples=40, deadline=None)
@given(_LABELS, st.integers(1, 5), st.integers(0, 8), st.integers(0, 2**32 - 1))
def test_lines_are_the_answers_as_json(labels, rows, top, seed):
    top = max(1, top)
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 4, (rows, len(labels))).astype(np.float32)
    known = draw.integers(0, 100, rows)
    targets = Classification(labels)
    with Workers(1) as workers:
        found = "".join(targets.lines(iter([logits]), top, known, workers)).split("\n")
    assert found.pop() == ""
    ranked = targets.answers(iter([logits]), top)
    expected = [{**answer, "known_terms": count} for answer, count in zip(ranked, known.tolist(), strict=True)]
    assert found == [encoded(answer) for answer in expected]


@pytest.mark.parametrize("rows", [0, 1, 4096, 4097, 9000])
def test_processes_make_the_same_lines_in_order(rows):
    draw = np.random.default_rng(rows)
    shares = draw.random((rows, 3)).astype(np.float32)
    known = np.arange(rows)
    alone = json_lines.lines(shares, known, ["a", "é", '"'], 2, 0.5)
    with Workers(2) as workers:
        assert "".join(json_lines.by_workers(shares, known, ["a", "é", '"'], 2, 0.5, workers)) == alone
    assert alone.count("\n") == rows
