"""Configure Sphinx: `make docs` writes the site to docs/_build/html without using the network.

The front page is README.md; docs/index.md lists the pages of its menu. The build first copies pages from other
folders, and writes a page for each public module, to docs/_pages. It also runs every command whose output is shown;
`python -m sphinx -t quick` skips that.
"""

from __future__ import annotations

import ast
import html
import importlib
import inspect
import os
import re
import shutil
import sys
import textwrap
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util import inspect as signatures
from sphinx.util import logging

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]
PAGES = HERE / "_pages"

import figures  # noqa: E402
import results  # noqa: E402
from PIL import Image  # noqa: E402

from minidl.version import __version__  # noqa: E402
from tests.pages import new_files, untrue  # noqa: E402

project, author, release = "minidl", "the minidl developers", __version__
copyright = author
html_show_copyright = False
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build", "_pages/README.md"]
suppress_warnings = ["myst.header"]  # a page from another folder keeps its heading levels
html_theme, html_title = "furo", f"minidl {release}"  # also the first line of the menu
html_static_path, html_css_files = ["_static"], ["site.css"]
highlight_language = "none"  # unless a block names its language
html_copy_source = html_show_sourcelink = html_use_index = False
templates_path: list[str] = []
default_role = "code"  # docstrings write names in single backquotes
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = figures.values()
nb_execution_mode = "off"  # notebooks contain their output from a GPU
autodoc_member_order = "bysource"
autodoc_typehints, autodoc_typehints_format = "signature", "short"
python_maximum_signature_line_length = 100  # longer signatures get a line per parameter
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# Pages of other folders and their names on the site.
OUTSIDE = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog", "benchmarks/notes.md": "worklog"}
RESULTS = "benchmarks/results"
# Modules whose public names get a page each.
MODULES = (
    "minidl", "minidl.nn", "minidl.nn.utils", "minidl.ops", "minidl.optim", "minidl.optim.lr_scheduler",
    "minidl.distributed", "minidl.data", "minidl.models", "minidl.torch", "minidl.torch.optim", "minidl.testing",
    "minidl.kernels.gemm", "minidl.kernels.bias_act", "minidl.kernels.conv", "minidl.kernels.softmax",
    "minidl.kernels.norm", "minidl.kernels.pool", "minidl.kernels.reduce", "minidl.kernels.update",
    "minidl.kernels.elementwise", "minidl.kernels.tree",
)  # fmt: skip
KERNELS = [name for name in MODULES if name.startswith("minidl.kernels.")]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})


def _menu() -> list[tuple[str, list[str]]]:
    """Return the sections of docs/index.md with their pages."""
    sections = re.split(r"^## ", (HERE / "index.md").read_text(), flags=re.MULTILINE)[1:]
    menu = []
    for section in sections:
        title, _, body = section.partition("\n")
        pages = [_target(link, HERE) for link in re.findall(r"\]\(([^)#]+)\)", body)]
        menu.append((title.strip(), [page for page in pages if page is not None]))
    return menu


def _target(link: str, folder: Path) -> str | None:
    """Return the page that a link in a file of `folder` leads to, relative to docs; None if the site lacks the file."""
    path = (folder / link).resolve()
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else ""
    if name in OUTSIDE:
        return f"_pages/{OUTSIDE[name]}.md"
    if name in ("README.md", RESULTS):
        return "index.md" if name == "README.md" else "_pages/results.md"
    if path.is_relative_to(HERE) and path.suffix == ".md":
        return str(path.relative_to(HERE))
    if path.suffix == ".ipynb":
        return f"_pages/{path.name}"
    module = ".".join(Path(name).with_suffix("").parts) + "."
    return next((f"_pages/{each}.md" for each in KERNELS if module.startswith(f"{each}.")), None)


def _relinked(text: str, folder: Path, up: str) -> str:
    """Point the links of a page to pages of the site and pictures to their files; drop links to other files."""

    def change(match: re.Match[str]) -> str:
        mark, words, link = match.groups()
        path, _, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        if mark:
            return f"![{words}]({up}../{(folder / path).resolve().relative_to(ROOT)})"
        page = _target(path, folder)
        return f"`{words}`".replace("``", "`") if page is None else f"[{words}]({up}{page}{anchor and '#' + anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", change, text)


def _front(text: str) -> str:
    """Return README.md with the menu."""
    lines = [_relinked((ROOT / "README.md").read_text(), ROOT, "")]
    links = [f"{name} <{url}>" for name, url in URLS.items()]
    for title, pages in [*_menu(), ("API reference", [f"_pages/{name}" for name in MODULES]), ("Links", links)]:
        if not pages:
            continue
        lines.append(f"```{{toctree}}\n:caption: {title}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n")
    return "\n".join(lines)


def _write_pages() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(path, PAGES)
    for file, name in OUTSIDE.items():
        path = ROOT / file
        (PAGES / f"{name}.md").write_text(_relinked(path.read_text(), path.parent, "../"))
    results.write(ROOT / RESULTS, PAGES)
    for name in MODULES:
        (PAGES / f"{name}.md").write_text(_names_of(name))


def _run_commands(app: Any) -> None:
    """Warn of each line that a page shows and its command does not print; tests run the pages that create files."""
    if app.tags.has("quick"):
        return
    pages = [page for page in sorted(HERE.glob("*.md")) if not any(new_files(page))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for problems in pool.map(lambda page: list(untrue(page)), pages):
            for problem in problems:
                logging.getLogger(__name__).warning(problem)


def _names_of(name: str) -> str:
    """Return a page of autodoc directives for the public names of a module."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}", "   :no-members:", ""]
    defined = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    for each in sorted(getattr(module, "__all__", defined), key=str.lower):
        value = getattr(module, each)
        if each.startswith("_") or inspect.ismodule(value) or str(getattr(value, "__module__", "")).startswith("torch"):
            continue
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        lines += [f".. auto{kind}:: {name}.{each}"]
        if kind == "class" and str(value.__module__).startswith("minidl"):
            lines += ["   :members:"]
            # nn.Module inherits its public methods from mixins, a file each.
            lines += ["   :inherited-members: object"] if each == "Module" else []
            # A layer's forward without a docstring would repeat that of nn.Module.
            forward = getattr(value, "forward", None)
            lines += ["   :exclude-members: forward"] if forward is not None and not forward.__doc__ else []
        lines += [""]
    lines += ["```", ""]
    for path in _sources(module) if name in KERNELS else ():
        lines += [f"## {path.relative_to(ROOT)}", "", "```python", *_arithmetic(path.read_text()), "```", ""]
    return "\n".join(lines)


def _sources(module: Any) -> list[Path]:
    """Return the files of a module or package that define kernels."""
    path = Path(module.__file__)
    files = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
    return [each for each in files if "@triton.jit" in each.read_text()]


def _arithmetic(text: str) -> list[str]:
    """Return the docstring, the kernels and their constants of a kernel file, without its launchers."""
    shown = []
    for node in ast.parse(text).body:
        part = ast.get_source_segment(text, node) or ""
        if isinstance(node, ast.FunctionDef):
            marks = [ast.get_source_segment(text, each) or "" for each in node.decorator_list]
            if not any("triton" in mark for mark in marks):
                continue
            shown += ["", "", *(f"@{mark}" for mark in marks)]
        elif not (isinstance(node, ast.Expr) or "constexpr" in part):
            continue
        shown += part.splitlines()
    return shown


def _as_rst(lines: list[str]) -> list[str]:
    """Convert a plain-text docstring to reStructuredText.

    A dash begins a list item; a name followed by two blanks begins a definition; other indented lines are code. Single
    backquotes are the only markup.
    """
    rst: list[str] = []
    state = "text"
    for line in lines:
        item = re.match(r" {0,3}- ", line)
        term = re.match(r"(\S.*?) {2,}(\S.*)", line)
        if not line.strip():
            now = "text" if state == "terms" else state
        elif item:
            now = "list"
        elif term:
            now = "terms"
        elif line.startswith("  "):
            now = state if state in ("list", "terms") else "code"
        else:
            now = "text"
        if now != state:
            rst += ["", *(["::", ""] if now == "code" else [])]
        state = now
        if state == "code":
            rst.append("    " + line)
        elif term:
            rst += ["", _plain(term[1]), "  " + _plain(term[2])]
        else:
            rst.append("  " * (state in ("list", "terms") and not item) + _plain(line))
    return rst


def _plain(line: str) -> str:
    """Escape markup outside of single backquotes."""
    return re.sub(r"(`[^`]*`)|([\\*|_])", lambda m: m[1] or "\\" + m[2], line.strip())


def setup(app: Any) -> None:
    _write_pages()

    def source(app: Any, page: str, text: list[str]) -> None:
        if page == "index":
            text[0] = _front(text[0])
        elif not page.startswith("_pages/"):
            text[0] = _relinked(text[0], (HERE / page).parent, "../" * page.count("/"))

    def docstring(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
        lines[:] = [*_as_rst(lines), ""]

    def lighten(app: Any, error: Exception | None) -> None:
        # Half of the bytes are unstyled spans, unused icons and indistinguishable colours.
        for path in Path(app.outdir, "_images").glob("*.png"):
            with Image.open(path) as picture:
                fewer = picture.convert("RGB").quantize(256)
            fewer.save(path, optimize=True)
        for path in Path(app.outdir, "_images").glob("*.svg"):
            path.write_text(" ".join(path.read_text().replace("fill: #ffffff", "fill: none").split()))
        icon = re.compile(r'<symbol id="([\w-]+)".*?</symbol>', re.DOTALL)
        plain = re.compile(r'<span class="(?:w|n|p|o|nn|nf|nc|pre|sig-paren)">([^<]*)</span>')
        for path in Path(app.outdir).rglob("*.map"):
            path.unlink()
        for path in Path(app.outdir).rglob("*.html"):
            text = path.read_text()
            while (less := plain.sub(r"\1", text)) != text:
                text = less
            text = icon.sub(lambda m, page=text: " ".join(m[0].split()) if f'"#{m[1]}"' in page else "", text)
            path.write_text(re.sub(r' title="Link to this (?:definition|heading)"', "", text))

    def signature(app: Any, what: str, name: str, value: Any, options: Any, arguments: Any, returned: Any) -> Any:
        # The metaclass's `__call__` would hide the parameters of a Module's `__init__`.
        if what != "class" or not inspect.isfunction(value.__init__):
            return None
        parameters = signatures.signature(value.__init__, bound_method=True)
        return signatures.stringify_signature(parameters, show_return_annotation=False, unqualified_typehints=True), ""

    def mark_options(app: Any, doctree: nodes.document) -> None:
        # A browser would break `--batch-size` after a hyphen.
        for literal in doctree.findall(nodes.literal):
            if re.fullmatch(r"--?\w[^\n]{0,40}", literal.astext()):
                literal["classes"].append("option")

    def describe(app: Any, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
        # Search engines show this text below the title.
        first = next(doctree.findall(nodes.paragraph), None) if doctree else None
        if first is not None:
            text = html.escape(textwrap.shorten(first.astext(), 200, placeholder=" ..."))
            context["metatags"] = context.get("metatags", "") + f'<meta name="description" content="{text}">'

    app.connect("builder-inited", _run_commands)
    app.connect("autodoc-process-signature", signature)
    app.connect("build-finished", lighten)
    app.connect("doctree-read", mark_options)
    app.connect("html-page-context", describe)
    app.connect("source-read", source)
    app.connect("autodoc-process-docstring", docstring)
