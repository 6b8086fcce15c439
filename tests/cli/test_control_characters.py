"""A terminal obeys control characters: in what the commands print, and in reports, those of names are escaped."""

import json
import os
import re
import shutil
import unicodedata

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from minidl.common import console
from minidl.data.parsing import encoded
from minidl.training.run_folder import folder_lock
from tests.cli.conftest import SMALL, edited, older, report, sentences, unfinished, write_csv

# Colours, a line that is erased, C1, text from right to left; a name may pretend to be a line of minidl's.
HOSTILE = "\x1b[2K\x9b\x7f\u202e\u2066\u2028x\nerror: forged"
_OVERRIDES = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
OF_FILE = HOSTILE + "\r\udcff"  # of a name that is no UTF-8


def assert_harmless(text):
    for character in text:
        kind = unicodedata.category(character)
        assert character in "\n\t" or kind not in ("Cc", "Cs", "Zl", "Zp"), (ascii(character), ascii(text))
        assert unicodedata.bidirectional(character) not in _OVERRIDES, ascii(text)
    assert not re.search("^error: forged", text, re.MULTILINE), ascii(text)


def harmless(done, code=0):
    """The result of a command, with nothing in it that a terminal obeys."""
    assert done.code == code, done.err
    assert_harmless(done.out)
    assert_harmless(done.err)
    return done


@pytest.fixture(scope="module")
def hostile_run(command, tmp_path_factory):
    """A text run whose data, columns, labels, terms and folder have such names."""
    folder = tmp_path_factory.mktemp("hostile")
    label = {"crude": f"crude{HOSTILE}", "grain": "grain", "trade": f"trade{HOSTILE}"}
    rows = [(f"{text} a\x1bb \x9bc", label[name]) for text, name in sentences(120)]
    data = write_csv(folder / f"data{HOSTILE}.csv", rows, (f"text{HOSTILE}", f"label{HOSTILE}"))
    out = folder / f"run{OF_FILE}"
    columns = ("--text-column", f"text{HOSTILE}", "--label-column", f"label{HOSTILE}")
    done = harmless(command("train", "text", "--data", data, "--out", out, *SMALL, *columns))
    assert "error: forged" in done.out
    return out, data


def test_every_control_character_is_escaped_and_no_letter_is():
    controls = "".join(map(chr, [*range(32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F)]))
    assert_harmless(console.one_line(controls + "".join(map(chr, range(0x2066, 0x206A))) + "\ud800"))
    assert console.escaped("a\tb\n\x1b\x7f\udcff") == "a\tb\n\\u001b\\u007f\\udcff"
    assert console.one_line("a\tb\n\r") == r"a\tb\n\r"
    for text in ("é ß 中文 עברית 👩\u200d👩\u200d👧 — \u00a0 \\n", '\x1b\x9b\x7f\u202e\n\t"\\\ud83d'):
        assert json.loads(encoded({text: [text]})) == {text: [text]}
        assert_harmless(encoded(text))
    assert console.one_line("é ß 中文 עברית 👩\u200d👩\u200d👧 — \\n") == "é ß 中文 עברית 👩\u200d👩\u200d👧 — \\n"


def test_commands_on_a_run_of_hostile_names(command, hostile_run, tmp_path):
    run, data = hostile_run
    assert_harmless((run / "report.txt").read_text())
    assert_harmless((run / "report.html").read_text())
    assert "error: forged" in (run / "report.txt").read_text()
    text = f"oil barrel a\x1bb \x9bc{HOSTILE}"
    for more in ((), ("--json",)):
        done = harmless(command("explain", run, text, *more))
        assert "crude" in done.out
    assert [json.loads(line)["text"] for line in done.out.splitlines()] == [text]
    answer = json.loads(harmless(command("predict", run, text)).out)
    assert answer["label"] in {entry["label"] for entry in report(run)["per_class"]}
    columns = ("--text-column", f"text{HOSTILE}", "--label-column", f"label{HOSTILE}")
    harmless(command("evaluate", run))
    harmless(command("evaluate", run, "--data", data, *columns))
    done = harmless(command("evaluate", run, "--data", data, "--text-column", f"no {HOSTILE}"), 2)
    assert "forged" in done.err
    done = harmless(command("train", "text", "--out", run, "--resume"))
    assert "is already finished" in done.out
    harmless(command("train", "text", "--data", data, "--out", run, *SMALL), 2)
    harmless(command("train", "table", "--out", run, "--resume"), 2)
    page = tmp_path / "all.html"
    shutil.copytree(run, tmp_path / "other")
    done = harmless(command("compare", run, tmp_path / "other", "--html", page))
    assert "error: forged" in done.out
    assert_harmless(page.read_text())


def test_settings_and_reports_that_were_edited(command, text_run, tmp_path):
    one, two = older(text_run[0], tmp_path / "one"), older(text_run[0], tmp_path / "two")
    edited(one / "config.json", lambda content: content["config"].update(text_column=HOSTILE))
    edited(one / "report.json", lambda content: content.update(task=HOSTILE, data=HOSTILE, device=HOSTILE))
    done = harmless(command("compare", one, two))
    assert done.out.count("error: forged") == 4  # task, data, device and the column
    edited(two / "config.json", lambda content: content.update(version=HOSTILE))
    harmless(command("evaluate", two), 2)
    edited(two / "config.json", lambda content: content.update(version=1, kind=HOSTILE))
    harmless(command("evaluate", two), 2)


def test_another_environment_on_resume(command, text_run, tmp_path):
    folder = unfinished(text_run[0], tmp_path / "run")
    edited(folder / "checkpoints" / "last.json", lambda content: content["environment"].update(processor=HOSTILE))
    done = harmless(command("train", "text", "--out", folder, "--resume", "--no-plots"))
    assert "processor: " in done.out
    assert "error: forged" in done.out
    assert_harmless((folder / "report.txt").read_text())


def test_the_lock_of_another_process(command, texts, tmp_path):
    out = tmp_path / "run"
    with folder_lock.lock(out):
        lock = tmp_path / ".run.lock"
        about = {"process": 7, "host": HOSTILE, "since": HOSTILE, "command": HOSTILE}
        lock.write_text(json.dumps(about))
        done = harmless(command("train", "text", "--data", texts, "--out", out, *SMALL), 2)
    assert "is being written by process 7" in done.err


def test_names_of_pictures_and_of_tensors(command, tmp_path):
    for number, name in enumerate(("a", f"b{HOSTILE}")):
        folder = tmp_path / "pictures" / name
        folder.mkdir(parents=True)
        for place in range(12):
            Image.new("L", (8, 8), 20 * (place + number)).save(folder / f"{place}.png")
    broken = os.path.join(os.fsencode(folder), os.fsencode(f"{OF_FILE}.png"))  # noqa: PTH118 (bytes)
    with open(broken, "wb") as file:  # noqa: PTH123
        file.write(b"no picture")
    images = ("train", "images", "--data", tmp_path / "pictures", "--out", tmp_path / "run", "--epochs", "1")
    done = harmless(command(*images), 2)
    assert "error: forged" in done.err
    os.unlink(broken)  # noqa: PTH108
    save_file({f"layer{HOSTILE}": torch.zeros(3, 3)}, tmp_path / "weights.safetensors")
    done = harmless(command(*images, "--model", "resnet18", "--init", tmp_path / "weights.safetensors"), 2)
    assert "error: forged" in done.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", HOSTILE),
        (HOSTILE,),
        ("predict", "run", f"--{HOSTILE}"),
        ("train", "text", "--epochs", HOSTILE, "--out", "run", "--data", "docstrings"),
        ("train", "text", "--schedule", HOSTILE, "--out", "run", "--data", "docstrings"),
        ("train", "text", "--out", "run", "--data", HOSTILE),
        ("compare", HOSTILE),
        ("compare", HOSTILE, HOSTILE),
        ("explain", HOSTILE, "a"),
        ("evaluate", HOSTILE),
        ("predict", HOSTILE, "a"),
        ("generate", "--model", HOSTILE, "--out", "pictures"),
        ("bench", "--show", HOSTILE),
        ("bench", HOSTILE),
        ("tune", "--only", HOSTILE),
        ("tune", "--from", HOSTILE),
        ("doctor", "--compile", HOSTILE),
        ("doctor", "--compile", "--only", HOSTILE),
        ("sanitize", HOSTILE),
        ("sanitize", "-m", HOSTILE),
    ],
)
def test_words_of_the_command_line(command, arguments):
    done = command(*arguments)
    assert done.code in (1, 2), done.err
    harmless(done, done.code)


def test_files_of_other_commands(command, tmp_path):
    for name, content in (("a", {HOSTILE: HOSTILE}), ("b", {"device": HOSTILE, "rows": {HOSTILE: {}}})):
        path = tmp_path / f"{name}{HOSTILE}.json"
        path.write_text(json.dumps(content))
        done = command("bench", "--show", path)
        harmless(done, done.code)


def test_a_script_and_its_kernel(minidl, tmp_path):
    script = tmp_path / f"own{HOSTILE}.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n"
        "@triton.jit\ndef past(out, n: tl.constexpr):\n"
        "    tl.store(out + tl.arange(0, n), 1.0)  # \x1b[31m\u202e\n"
        "past[(1,)](torch.zeros(4), 8)\n"
    )
    done = harmless(minidl("sanitize", script), 1)
    assert "tl.store(out + tl.arange(0, n), 1.0)" in done.err
