"""The README and docs/performance.md show the committed results of `minidl bench`."""

import re
from pathlib import Path

import pytest

from benchmarks.bench import results_page
from minidl.errors import ConfigError
from minidl.tools.bench import chart, results
from minidl.tools.bench.goals import GOALS

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "benchmarks" / "results" / "nvidia-h200.json"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_show_the_chart_of_the_committed_results(page):
    """Otherwise run `make results`."""
    path = ROOT / page
    link = re.search(r"!\[[^]]*\]\(([^)]*svg)\)", path.read_text())[1]
    assert chart.fingerprint(results.load(COMMITTED)) in (path.parent / link).read_text()


def test_the_page_shows_the_table_of_the_committed_results():
    """Otherwise run `make results`."""
    text = (ROOT / "docs/performance.md").read_text()
    assert results_page.inserted(text, results_page.markdown(results.load(COMMITTED))) == text


def test_the_short_chart_shows_eight_rows():
    pytest.importorskip("matplotlib")
    assert set(results_page.SHORT) <= set(GOALS)
    picture = results_page.short_picture(results.load(COMMITTED)).decode()
    assert len(results_page.SHORT) == 8
    assert all(row.replace(">", "&gt;") in picture for row in results_page.SHORT)


def test_a_text_without_marks_is_refused():
    with pytest.raises(ConfigError, match="results: begin"):
        results_page.inserted("no marks", "table")
