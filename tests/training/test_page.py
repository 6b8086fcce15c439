"""report.html: well formed, whole in itself, and what it shows is text."""

import html.parser
import re
import shutil
import subprocess

import pytest
from PIL import Image

from minidl.training.report import page

EMPTY = {"meta", "img", "path", "polyline"}
BAD = "<script>alert(1)</script> & \udcff \"'"


class _Read(html.parser.HTMLParser):
    """The tags and text of a page; fails for tags that do not close as they opened."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts, self.links = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.texts += [value for name, value in attrs if name in ("title", "alt", "aria-label")]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(text):
    parser = _Read()
    parser.feed(text)
    assert parser.open == []
    return parser


def report(**more):
    return {
        "task": "classification", "data": BAD, "device": "cpu", "seconds": 1234.56, "epochs": 2, "best_epoch": 2,
        "parameters": 12_345, "source": {"about": BAD}, "accuracy": 0.75, "macro_f1": 0.5,
        "baseline": {"majority": {"accuracy": 0.5, "macro_f1": 0.25}, "linear": {"method": BAD, "accuracy": 1.0}},
        "per_class": [{"label": name, "precision": 1, "recall": 0.5, "f1": 0.25, "support": 4} for name in (BAD, "b")],
        "confusion": [[3, 1], [0, 4]], "phases": {"train": 2.0, "read": 1.0, "total": 3.0}, **more,
    }  # fmt: skip


HISTORY = [
    {"epoch": 1, "loss": 2.0, "validation": {"loss": 1.5, "accuracy": 0.25}, "lr": 0.1, "seconds": 1.0, "steps": 4},
    {
        "epoch": 2,
        "loss": 1.0,
        "validation": {"loss": float("nan"), "accuracy": 0.5},
        "lr": 0.1,
        "seconds": 1,
        "steps": 8,
    },
]


def test_all_of_a_run_is_there_and_nothing_but_text(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "mistakes.png")
    mistakes = [
        {"true": BAD, "predicted": "b", "probability": 0.9, "terms": [(BAD, 1.25), ("word", -0.5)], "text": BAD * 99}
    ]
    text = page.as_html(tmp_path, report(), HISTORY, {"lr": 0.1, "name": BAD}, {"torch": BAD}, mistakes)
    parser = read(text)
    assert "script" not in parser.tags
    assert [link[:22] for link in parser.links] == ["data:image/png;base64,"]
    assert not re.search(r"https?://|url\(|@import", text)
    content = "\n".join(parser.texts)
    assert content.count(BAD.replace("\udcff", "\\udcff")) >= 8
    for shown in ("0.7500", "1,234.6", "12,345", "validation", "3 of 4", "+1.25", "-0.50", "2.00 s"):
        assert shown in content, shown
    assert content.count("loss over 2 epochs") == 1
    text.encode()


def test_many_classes_have_a_list_of_confusions(tmp_path):
    many = [{"label": f"c{i}", "precision": 1, "recall": 1, "f1": 1, "support": i} for i in range(300)]
    pairs = [{"true": "c1", "predicted": "c2", "count": 1_234}]
    results = report(per_class=many, confusions=pairs)
    del results["confusion"]
    content = "\n".join(read(page.as_html(tmp_path, results, HISTORY, {}, {})).texts)
    assert "1,234" in content
    assert "The 200 most frequent of 300 classes." in content
    counts = [[0] * 70 for _ in range(70)]
    counts[3][5] = 77
    results = report(per_class=many[:70], confusion=counts)
    content = "\n".join(read(page.as_html(tmp_path, results, HISTORY, {}, {})).texts)
    assert "Most frequent confusions" in content
    assert "77" in content


def test_other_runs(tmp_path):
    """A generator's, with two counts of parameters and figures of its own; a number's; one of a single epoch."""
    (tmp_path / "samples").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "samples" / "epoch-001.png")
    Image.new("L", (4, 4)).save(tmp_path / "training.gif")
    generator = {
        "task": "gan", "data": "digits", "device": "cpu", "seconds": 1.0, "epochs": 1,
        "parameters": {"generator": 10, "discriminator": 20}, "source": {"name": "digits"},
    }  # fmt: skip
    records = [{"epoch": 1, "generator_loss": 0.5, "real": 0.75}]
    parser = read(page.as_html(tmp_path, generator, records, {}, {}))
    assert len(parser.links) == 2
    assert {"generator loss", "real", "30"} <= set(parser.texts)
    number = report(r2=0.5, rmse=2.0, task="regression")
    for name in ("accuracy", "macro_f1", "per_class", "confusion"):
        del number[name]
    number["baseline"] = {"mean": {"r2": 0.0, "rmse": 3.0}}
    assert "0.5000" in "\n".join(read(page.as_html(tmp_path / "none", number, HISTORY[:1], {}, {})).texts)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# What a browser made of the page; itself its only script.
MEASURE = """<script>document.documentElement.dataset.seen = [
document.scripts.length, document.documentElement.scrollWidth - innerWidth,
[...document.images].filter(each => !each.naturalWidth).length, document.querySelectorAll("svg").length].join(" ")
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1440, 500])
def test_a_browser_shows_it(tmp_path, width):
    Image.new("RGB", (900, 40)).save(tmp_path / "mistakes.png")
    mistakes = [{"true": BAD, "predicted": "b" * 200, "probability": 0.9, "terms": [(BAD, 1.25)]}]
    results = report(command="minidl train " + "text " * 99)
    text = page.as_html(tmp_path, results, HISTORY, {"lr": 0.1, "name": "/long" * 99}, {"torch": BAD}, mistakes)
    (tmp_path / "page.html").write_text(text + MEASURE)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom"]
    shown = subprocess.run([*command, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, check=True)
    scripts, beyond, broken, drawn = re.search(r'data-seen="([^"]*)"', shown.stdout)[1].split()
    assert (scripts, broken) == ("1", "0")
    assert int(beyond) <= 0
    assert int(drawn) >= 1
