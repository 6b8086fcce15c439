"""The package as a whole: what an import costs, its names, its version, what it never does, what is shipped."""

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import minidl
from tests import release

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minidl"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["minidl", "minidl.cli"])
def test_import_loads_nothing_heavy(module):
    heavy = "{'torch', 'triton', 'numpy', 'scipy', 'sklearn', 'matplotlib', 'importlib.metadata'}"
    heavy = heavy if module == "minidl" else heavy.replace(", 'importlib.metadata'", "")
    assert run_python(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))").strip() == "[]"


@pytest.mark.parametrize("command", [path.stem for path in sorted((PACKAGE / "cli").glob("[!_]*.py"))])
def test_a_command_loads_torch_and_triton_only_after_it_has_chosen_the_device(command):
    """Triton reads TRITON_INTERPRET when it is imported, and commands compile for the CPU by default."""
    loaded = run_python(f"import sys, minidl.cli.{command}; print(sorted({{'torch', 'triton'}} & set(sys.modules)))")
    assert loaded.strip() == "[]"


def test_triton_may_be_imported_after_minidl(monkeypatch):
    """Before anything of minidl was used: without a GPU, kernels are interpreted all the same."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert run_python("import minidl, triton, triton.language; print(minidl.ones(3).sum().item())") == "3.0\n"


@pytest.mark.parametrize("name", minidl.__all__)
def test_every_public_name_resolves(name):
    assert getattr(minidl, name) is not None
    assert name in dir(minidl)


@pytest.mark.parametrize(
    "name", ["minidl.kernels.gemm.gemm", "minidl.kernels.conv.explain", "minidl.testing.sanitize", "minidl.nn.Linear"]
)
def test_a_dotted_name_needs_only_the_import_of_minidl(name):
    done = subprocess.run([sys.executable, "-c", f"import minidl; {name}"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_chapter_that_there_is_not():
    with pytest.raises(AttributeError, match=r"module 'minidl\.kernels' has no attribute 'nothing'"):
        minidl.kernels.nothing  # noqa: B018


def test_names_agree():
    """A static tool sees the names of the TYPE_CHECKING block, a program the tables, a star import `__all__`."""
    names = set(minidl.__all__) - {"__version__"}
    assert names == {*minidl._SUBMODULES, *minidl._MODULES}
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.asname for statement in block.body for alias in statement.names} - {None}
    stars = [statement.module for statement in block.body if statement.names[0].name == "*"]
    typed.update(name for module in stars for name in importlib.import_module(module).__all__)
    assert typed == names


def test_operators_are_there_without_importing_ops():
    code = "from minidl import as_tensor; print((as_tensor([1.0]) + as_tensor([2.0])).item())"
    assert run_python(code).strip() == "3.0"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'minidl' has no attribute 'tensr'"):
        _ = minidl.tensr


def test_version_is_the_installed_one():
    try:
        installed = importlib.metadata.version("minidl")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("minidl is not installed here, only on the path")
    assert installed == minidl.__version__


def test_every_file_that_has_the_version_has_this_one():
    assert set(release.versions().values()) <= {minidl.__version__, "Unreleased"}


def test_dependencies_have_lower_bounds_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for requirement in requirements:
        assert re.fullmatch(r"[a-z-]+>=[\d.]+(; sys_platform == 'linux')?", requirement), requirement


PICKLING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
PICKLING_CALLS = {("torch", "load"), ("torch", "save")}


def pickling(tree: ast.AST) -> list[str]:
    """What could pickle or unpickle: modules, torch's functions by their usual names, `allow_pickle=`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in PICKLING_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLING_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{a.name}" for a in node.names if (node.module, a.name) in PICKLING_CALLS]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in PICKLING_CALLS:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            found.append("allow_pickle")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_pickled(path):
    assert pickling(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import os, joblib.numpy_pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "read = torch.save",
        "np.load('x', allow_pickle=True)",
    ],
)
def test_the_pickle_scan_finds(code):
    assert len(pickling(ast.parse(code))) == 1


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Folder with the wheel and the source distribution of the working tree."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_the_wheel_holds_the_whole_package_and_nothing_else(distributions):
    (wheel,) = distributions.glob("*.whl")
    release.check_wheel(wheel)
    release.check_metadata(wheel)


def test_the_source_distribution_holds_the_package_its_tests_and_its_licence(distributions):
    (sdist,) = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert names >= release.package_files() | {
        "LICENSE",
        "README.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        "docs/index.md",
        "pyproject.toml",
        "tests/test_package.py",
    }
