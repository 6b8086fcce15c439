import re

from minidl.cli import reference
from tests.cli.conftest import ROOT


def test_the_page_is_that_of_this_version():
    told = "docs/reference.md is old: python -m minidl.cli.reference > docs/reference.md"
    assert (ROOT / "docs" / "reference.md").read_text() == reference.page(), told


def test_every_option_has_a_help_text():
    """A limit or text inside `Annotated[...] | None` is lost, and a typer before 0.29 refuses it."""
    rows = [line.split("|")[1:4] for line in reference.page().splitlines() if line.startswith("| `--")]
    assert len(rows) > 50
    assert not [name for name, _, text in rows if not text.strip() or text.strip().startswith("Default:")]


def test_every_variable_is_there():
    sources = "".join(path.read_text() for path in (ROOT / "minidl").rglob("*.py"))
    assert set(re.findall(r"MINIDL_[A-Z]+", sources)) <= set(re.findall(r"MINIDL_[A-Z]+", reference.page()))
