"""docs/: its commands parse, its Python blocks run, its links and paths lead somewhere."""

import importlib.util
import inspect
import re
import shlex
import subprocess
import sys

import jinja2
import pytest
import typer

from minidl.cli import app
from minidl.cli.options import read
from minidl.errors import ConfigError
from minidl.training.settings.declaration import Written, note
from tests.pages import CHAPTERS, PAGES, ROOT, blocks, commands, new_files, prose, untrue
from tests.test_readme import recipe, run

# click's, which some versions of typer bring themselves.
USAGE_ERROR = typer.BadParameter.__base__
COMMANDS = typer.main.get_command(app)
LINK = re.compile(r"(?<!!)\[[^]]+\]\(([^)\s]+)\)|!\[[^]]*\]\(([^)\s]+)\)")
DOCS = [page for page in PAGES if page.parent.name == "docs"]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


INCLUDED = re.compile(r"literalinclude\} (\S+)\n((?::.*\n)*)")


@each_page
def test_included_sources_have_the_lines_where_they_begin_and_end(page):
    for path, options in INCLUDED.findall(page.read_text()):
        lines = (page.parent / path).read_text().splitlines()
        for option, text in re.findall(r"^:(start-at|end-at): (.*)$", options, re.MULTILINE):
            matches = [number for number, line in enumerate(lines) if text.strip('"') in line]
            assert matches, f"{path} has no line with {text}"
            lines = lines[matches[0] :] if option == "start-at" else lines[: matches[0] + 1]


def of_page(page):
    """The words of every command that a page shows, in blocks and in lines; pipes and assignments taken apart."""
    inline = [shlex.split(code) for code in re.findall(r"`((?:minidl|make|python -m) [^`]+)`", prose(page))]
    for words in [*(words for words, _ in commands(page)), *inline]:
        parts = " ".join("\n" if word == "|" else shlex.quote(word) for word in words).splitlines()
        for part in map(shlex.split, parts):
            while re.match(r"[A-Z_]+=", part[0]):
                part = part[1:]
            yield part


def check_minidl(words):
    """Fails for a command line that no command takes; a command alone, without arguments, is its name."""
    command, rest = COMMANDS, words[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name, *rest = rest
        if name == "COMMAND":  # of any
            return
        assert name in command.commands, f"no command {name!r}: {shlex.join(words)}"
        command = command.commands[name]
    if rest and not hasattr(command, "commands"):
        try:
            context = command.make_context(command.name, rest)
        except USAGE_ERROR as error:
            pytest.fail(f"{shlex.join(words)}: {error.format_message()}")
        callback = context.command.callback  # None of a group
        fields = inspect.unwrap(callback).fields if callback else {}
        for name, value in context.params.items():
            if name in fields and value is not None and note(fields[name], Written) is None:
                read(name, fields[name], value)  # a ConfigError for what is no number


def check(words):
    """Fails for a command that cannot be run as it stands."""
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "minidl":
        check_minidl(words)
    elif words[0] == "torchrun":
        assert words[words.index("-m") + 1] == "minidl"
        check_minidl(words[words.index("-m") + 1 :])
    elif words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), shlex.join(words)
        assert recipe(words) or target in ("venv", "help")
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]), shlex.join(words)
        assert all((ROOT / word).exists() for word in words[3:] if word.startswith("tests/"))
    else:
        others = ("git", "cd", "python3", "python", ".", "pip", "docker", "export", "echo", "wait", "ls", "grep")
        assert words[0] in others, shlex.join(words)


@each_page
def test_commands_are_ones_that_there_are(page):
    for words in of_page(page):
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "minidl trian text",
        "minidl evaluate --samples 3",
        "minidl predict RUN --tap 3",
        "minidl tune --budget x",
        "make tea",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises((AssertionError, pytest.fail.Exception, ConfigError)):
        check(shlex.split(line))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["python", "kernels", "profiling", "in-torch"])
def test_python_blocks_run(name, tmp_path):
    text = "\n".join(block.text for block in blocks(ROOT / "docs" / f"{name}.md", "python"))
    script = tmp_path / "page.py"
    script.write_text(text)
    run([sys.executable, script.name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in DOCS if any(new_files(page))], ids=lambda page: page.stem)
def test_commands_print_what_the_page_says(page):
    """`make docs` checks the pages that need no files of their own."""
    assert not list(untrue(page))


def test_chapters_print_what_they_say(tmp_path):
    """All in one process: most of it would be the start of torch."""
    codes = ["\n".join(block.text for block in blocks(page, "python")) for page in CHAPTERS]
    said = ["".join(block.text for block in blocks(page, "text")) for page in CHAPTERS]
    assert sum(map(bool, codes)) >= 5
    script = tmp_path / "chapters.py"
    script.write_text(f"for code in {codes!r}:\n    exec(code, {{}})\n")
    assert run([sys.executable, script.name], tmp_path) == "".join(said)


def test_chapters_show_figures_and_numbers_that_there_are(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    values = importlib.import_module("figures").values()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    shown = "".join(environment.from_string(page.read_text()).render(values) for page in CHAPTERS)
    figures = re.findall(r"<svg [^>]*>", shown)
    assert len(figures) > 20
    assert all(re.search(r'role="img" aria-label="[^"]{20,}"', figure) for figure in figures)
    # As its table has it: the ladder begins at 1 % of cuDNN, and ends ahead of it.
    assert float(values["few"]["one_output_per_program"]["ratio"]) < 0.01 < 5 < float(values["few"]["banded"]["ratio"])


MODULES = sorted(
    {name for page in PAGES for name in re.findall(r"python -m ((?:tests|benchmarks)[\w.]+)", page.read_text())}
)


START = "import runpy, sys\nfor name in sys.argv[1:]:\n    runpy.run_module(name)\nprint('all')"


def test_modules_that_pages_name_start():
    """Those of a GPU say that there is none."""
    assert len(MODULES) > 10
    command = [sys.executable, "-c", START, *MODULES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("all\n"), done.stderr


def anchors(page):
    """The names of a page's headings, as links have them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page):
    for link in (one or other for one, other in LINK.findall(page.read_text())):
        if link.startswith("https://"):
            assert f"]({link})" in (ROOT / "docs" / "links.md").read_text(), f"{link} is not in docs/links.md"
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_a_page_has_one_title(page):
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


@each_page
def test_paths_exist(page):
    made = set(re.findall(r"New file `([^`]+)`", page.read_text()))
    for path in re.findall(r"`((?:minidl|tests|benchmarks|notebooks|docs)/[\w./-]+)`", prose(page)):
        assert (ROOT / path).exists() or path in made, path


def test_the_index_names_every_page():
    index = ROOT / "docs" / "index.md"
    linked = set(re.findall(r"\]\(([\w/-]+\.md)\)", index.read_text()))
    pages = {str(page.relative_to(index.parent)) for page in PAGES if page.is_relative_to(index.parent)}
    assert linked == pages - {"index.md"}


def test_pages_of_use_begin_with_a_sentence_and_a_command_with_its_output():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = re.findall(r"\]\(([\w-]+\.md)\)", index.partition("## Use it")[2].partition("\n## ")[0])
    assert len(pages) >= 10
    for page in pages:
        text = (ROOT / "docs" / page).read_text()
        assert re.match(r"# .+\n\n(?:[A-Z](?:.+\n)+\n)?```console\n\$ .+\n[^$`]", text), page
