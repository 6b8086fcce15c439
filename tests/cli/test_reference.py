from minidl.cli import reference
from tests.cli.conftest import ROOT


def test_the_page_is_that_of_this_version():
    told = "docs/reference.md is old: python -m minidl.cli.reference > docs/reference.md"
    assert (ROOT / "docs" / "reference.md").read_text() == reference.page(), told
