"""README.md, CONTRIBUTING.md and docs/ as data: their blocks, their commands, and whether these print what is shown."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CHAPTERS = sorted((ROOT / "docs" / "learn").glob("*.md"))
PAGES += CHAPTERS
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the last paragraph before it."""

    language: str
    text: str
    before: str


def blocks(page, language):
    """The page's blocks in a language, in order."""
    text = page.read_text()
    found = [
        Block(match[1], match[2], text[: match.start()].rstrip().rpartition("\n\n")[2])
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if block.language == language]


def new_files(page):
    """(path, text) of each block that a page calls a new file."""
    for language in ("python", "json"):
        for block in blocks(page, language):
            if named := re.search(r"New file `([^`]+)`", block.before):
                yield named[1], block.text


def lines(page):
    """(line, output) of each command in the page's console blocks: a line with a `$`, and the lines below it."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield line, output


def commands(page):
    """(words, output) of each command in the page's console blocks."""
    return ((shlex.split(line, comments=True), output) for line, output in lines(page))


def prose(page):
    """The page without its fenced blocks."""
    return BLOCK.sub("", page.read_text())


def untrue(page):
    """What is wrong with a page, in words: commands that show their output are run, one after another in a folder with
    the page's new files, and each line that the page shows must be printed."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for path, text in new_files(page):
            (here / path).write_text(text)
        (here / "bin").mkdir()
        for name, start in (("python", ""), ("python3", ""), ("minidl", "-m minidl")):
            (here / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n')
            (here / "bin" / name).chmod(0o755)
        path = f"{here / 'bin'}:{os.environ['PATH']}"
        # A pytest among the commands is no worker of this one.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        for line, output in lines(page):
            if output:
                done = subprocess.run(
                    ["bash", "-c", line], cwd=here, env=environment, capture_output=True, text=True, check=False
                )
                printed = done.stdout + done.stderr
                for missing in unprinted(printed, output):
                    yield f"{page.name}: `{line}` does not print\n{missing}\nbut\n{printed}"


def unprinted(printed, shown):
    """The lines of a page that are not printed, figures aside; `...` stands for whatever lies between."""
    there = printed.splitlines()
    known = {_shape(line) for line in there} | {"..."}
    kinds = [_types(json.loads(line)) for line in there if line.startswith("{")]
    for line in shown.splitlines():
        if _types(json.loads(line)) not in kinds if line.startswith("{") else _shape(line) not in known:
            yield line


def _shape(line):
    """A line of output without its figures, their units of time (a fast machine prints ms for s) and widths."""
    line = re.sub(r"\d[\d.,]*( (us|ms|s|min)\b)?", "0", line)
    return re.sub(r"([\s=-])\1+", r"\1", line).strip()


def _types(value):
    """The keys and types of a JSON value; lists by their first item."""
    if isinstance(value, dict):
        return {name: _types(part) for name, part in value.items()}
    return [_types(part) for part in value[:1]] if isinstance(value, list) else type(value).__name__
