"""What errors say: no name in braces is left in a message, as where an f is missing."""

import ast
import re
from pathlib import Path

import pytest

import minidl

FOLDER = Path(minidl.__file__).parent
FIELD = re.compile(r"\{[a-z_]\w*(?:[.\[(][^{}]*)?(?:![rsa])?(?::[^{}]*)?\}")


def unfilled(source):
    """The texts of errors and of f-strings that have a field of a format in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise | ast.JoinedStr):
            inner = ast.walk(node) if isinstance(node, ast.Raise) else node.values
            yield from (
                each.value
                for each in inner
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and FIELD.search(each.value)
            )


def test_no_message_has_a_name_in_braces():
    found = {str(path): list(unfilled(path.read_text())) for path in FOLDER.rglob("*.py")}
    assert {path: texts for path, texts in found.items() if texts} == {}


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError(f"{count} are too many; take " "fewer {self.flag}")',
        'raise ValueError("expected {expected}")',
        'text = f"{count} of " "{total:,}"',
    ],
)
def test_a_name_in_braces_is_seen(source):
    assert list(unfilled(source))
    assert not list(unfilled('raise ValueError(f"{count} are too many; take {less:,}")'))
