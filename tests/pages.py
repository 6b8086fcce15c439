"""README.md, CONTRIBUTING.md and docs/ as data: their blocks and commands."""

import re
import shlex
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


def commands(page):
    """(words, output) of each command in the page's console blocks: a line with a `$`, and the lines below it."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield shlex.split(line, comments=True), output


def prose(page):
    """The page without its fenced blocks."""
    return BLOCK.sub("", page.read_text())
