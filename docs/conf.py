"""The site of these pages: `make docs` writes it to docs/_build/html; nothing is fetched.

The front page is README.md with the list of docs/index.md as its menu. Pages from outside this folder, and a page for
each module with public names, are written to docs/_pages first. The commands whose output pages show are run, which
`python -m sphinx -t quick` leaves out.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
suppress_warnings = ["myst.header"]  # a page from another folder begins where it does there
html_theme, html_title = "furo", "minidl"
html_static_path, html_css_files = ["_static"], ["site.css"]
highlight_language = "none"  # but where a page says another
html_copy_source = html_show_sourcelink = html_use_index = False
templates_path: list[str] = []
default_role = "code"  # docstrings have names in single backquotes
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "substitution"]
myst_substitutions = figures.values()
nb_execution_mode = "off"  # notebooks hold what they gave on a GPU
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them already, as they are written
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True

# Pages of other folders, by the name that they have on the site.
OUTSIDE = {"CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog", "benchmarks/notes.md": "worklog"}
RESULTS = "benchmarks/results"
# Modules whose public names are a page each.
MODULES = (
    "minidl", "minidl.nn", "minidl.nn.utils", "minidl.ops", "minidl.optim", "minidl.optim.lr_scheduler",
    "minidl.distributed", "minidl.data", "minidl.models", "minidl.torch", "minidl.torch.optim", "minidl.testing",
    "minidl.kernels.gemm", "minidl.kernels.bias_act", "minidl.kernels.conv", "minidl.kernels.softmax",
    "minidl.kernels.norm", "minidl.kernels.pool", "minidl.kernels.reduce", "minidl.kernels.update",
    "minidl.kernels.elementwise", "minidl.kernels.tree",
)  # fmt: skip
KERNELS = [name for name in MODULES if name.startswith("minidl.kernels.")]


def _menu() -> list[tuple[str, list[str]]]:
    """The parts of docs/index.md, with their pages."""
    parts = re.split(r"^## ", (HERE / "index.md").read_text(), flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        title, _, body = part.partition("\n")
        pages = [_target(link, HERE) for link in re.findall(r"\]\(([^)#]+)\)", body)]
        found.append((title.strip(), [page for page in pages if page is not None]))
    return found


def _target(link: str, folder: Path) -> str | None:
    """The page of the site that a link of a file in a folder leads to, from this folder; None for another file."""
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
    """A page with its links leading to those of the site, pictures to where they are, and none to other files."""

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
    """README.md, and the menu."""
    lines = [_relinked((ROOT / "README.md").read_text(), ROOT, "")]
    for title, pages in [*_menu(), ("Names", [f"_pages/{name}" for name in MODULES])]:
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
    """Warn of each line that a page shows and its command does not print. Pages with files of their own are tests."""
    if app.tags.has("quick"):
        return
    pages = [page for page in sorted(HERE.glob("*.md")) if not any(new_files(page))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(lambda page: list(untrue(page)), pages):
            for what in found:
                logging.getLogger(__name__).warning(what)


def _names_of(name: str) -> str:
    """A page of directives for the public names of a module."""
    module = importlib.import_module(name)
    lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}", "   :no-members:", ""]
    own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == name]
    for each in sorted(getattr(module, "__all__", own), key=str.lower):
        if each.startswith("_"):
            continue
        value = getattr(module, each)
        if inspect.ismodule(value) or str(getattr(value, "__module__", "")).startswith("torch"):
            continue
        kind = "class" if inspect.isclass(value) else "function" if callable(value) else "data"
        lines += [f".. auto{kind}:: {name}.{each}"]
        if kind == "class" and str(value.__module__).startswith("minidl"):
            lines += ["   :members:"]
            # What nn.Module has of its parts, each of which has a file.
            lines += ["   :inherited-members: object"] if each == "Module" else []
        lines += [""]
    lines += ["```", ""]
    for path in _sources(module) if name in KERNELS else ():
        lines += [f"## {path.relative_to(ROOT)}", "", "```python", *_arithmetic(path.read_text()), "```", ""]
    return "\n".join(lines)


def _sources(module: Any) -> list[Path]:
    """The file of a module, or those of a package; if they hold kernels."""
    path = Path(module.__file__)
    files = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else [path]
    return [each for each in files if "@triton.jit" in each.read_text()]


def _arithmetic(text: str) -> list[str]:
    """Of a kernel file what its head says, its kernels, and the constants they use; launchers are in the package."""
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
    """A docstring, which is plain text: dashes begin items, a name and two blanks what is said of it, what is indented
    else is code, and no sign is a markup but single backquotes."""
    found: list[str] = []
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
            found += ["", *(["::", ""] if now == "code" else [])]
        state = now
        if state == "code":
            found.append("    " + line)
        elif term:
            found += ["", _plain(term[1]), "  " + _plain(term[2])]
        else:
            found.append("  " * (state in ("list", "terms") and not item) + _plain(line))
    return found


def _plain(line: str) -> str:
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
        # Half of the site's bytes are marks of code that no style colours, icons that a page does not show, and
        # colours of pictures that nobody can tell apart.
        for path in Path(app.outdir, "_images").glob("*.png"):
            with Image.open(path) as picture:
                fewer = picture.convert("RGB").quantize(256)
            fewer.save(path, optimize=True)
        for path in Path(app.outdir, "_images").glob("*.svg"):
            path.write_text(" ".join(path.read_text().split()))
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

    def signature(app: Any, what: str, name: str, value: Any, options: Any, given: Any, returned: Any) -> Any:
        # Of a module `__call__` of its class's class hides what is taken.
        if what != "class" or not inspect.isfunction(value.__init__):
            return None
        _self, *rest = inspect.signature(value.__init__).parameters.values()
        return str(inspect.Signature(each.replace(annotation=each.empty) for each in rest)), returned

    app.connect("builder-inited", _run_commands)
    app.connect("autodoc-process-signature", signature)
    app.connect("build-finished", lighten)
    app.connect("source-read", source)
    app.connect("autodoc-process-docstring", docstring)
