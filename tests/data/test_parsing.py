"""JSON of any depth, and texts for messages."""

import pytest

from minidl.common.console import cut
from minidl.data.parsing import MAX_NESTING, can_encode_utf8, parse_json


def nested(depth, inner="1"):
    return "[" * depth + inner + "]" * depth


def test_json_as_deep_as_it_may_be():
    assert parse_json(nested(MAX_NESTING)) == eval(nested(MAX_NESTING))
    assert parse_json(nested(3).encode()) == [[[1]]]
    many = "[" + ",".join(["[1]"] * 1000) + "]"
    assert len(parse_json(many)) == 1000


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 500, 990, 100_000])
def test_deeper_json_is_refused(depth):
    """Near the depth of Python's stack it could be read, and what is made of it would fail."""
    for text in (nested(depth), '{"a":' * depth + "1" + "}" * depth, f'{{"a": 1, "b": [2, {nested(depth)}]}}'):
        with pytest.raises(ValueError, match=f"nested more than {MAX_NESTING} deep"):
            parse_json(text)


def test_brackets_in_a_text_are_no_lists():
    assert parse_json('"' + "[" * 1000 + '"') == "[" * 1000


def test_texts_for_messages():
    assert cut("x" * 300) == "x" * 300
    assert cut("x" * 301) == "x" * 297 + "..."
    assert can_encode_utf8("é")
    assert not can_encode_utf8("\ud800")
