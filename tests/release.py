"""Whether the distributions in dist/ can be released; `make release-check` makes them and runs this.

    python -m tests.release              of every Python that pyproject.toml names and that is on PATH
    python -m tests.release --write      also writes docs/licences.md anew

Nothing but the standard library is imported at the top, so that the environment around it can be small.
"""

from __future__ import annotations

import argparse
import datetime as dt
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path

from minidl.version import __version__

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
LICENCES = ROOT / "docs" / "licences.md"
MOST_BYTES, MOST_WEIGHTS = 6_000_000, 4_500_000
SUFFIXES = {".c", ".h", ".py", ".typed", ".json", ".gz", ".safetensors", ""}  # nothing compiled
EXTRAS = "plots,arrow"

# Terms of SPDX, and what older metadata call them.
PERMISSIVE = {
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "LLVM-exception", "MIT",
    "MIT-CMU", "PSF-2.0", "Zlib",
}  # fmt: skip
OLDER = {
    "Apache Software License": "Apache-2.0", "BSD License": "BSD", "ISC License (ISCL)": "ISC", "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}  # fmt: skip
OF_CUDA = ("nvidia-", "cuda-")  # NVIDIA's, which torch's builds for CUDA bring; the page says so


def versions() -> dict[str, str]:
    """The version by each file that has it; of the changelog its newest heading, which may be Unreleased."""
    citation = (ROOT / "CITATION.cff").read_text()
    return {
        "minidl/version.py": __version__,
        "CITATION.cff": re.findall(r"^version: (.+)$", citation, re.MULTILINE)[0],
        "CHANGELOG.md": _newest_heading()[0],
    }


def _newest_heading() -> tuple[str, str]:
    """(version, date) of the first heading of the changelog; the date is empty where there is none."""
    return re.findall(r"^## \[(.+?)\](?: - (.*))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]


def package_files() -> set[str]:
    """What the wheel holds: all of minidl/."""
    found = (path for path in (ROOT / "minidl").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(ROOT)) for path in found}


def members(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel; those of its dist-info without the folder's version."""
    with zipfile.ZipFile(wheel) as archive:
        return {re.sub(r"^minidl-[^/]+(?=/)", "dist-info", name): archive.read(name) for name in archive.namelist()}


def check_wheel(wheel: Path) -> None:
    """The package with its weights and licence, for every platform, and nothing else."""
    files = members(wheel)
    package = {name for name in files if not name.startswith("dist-info/")}
    assert package == package_files()
    assert {Path(name).suffix for name in package} <= SUFFIXES
    assert sum(len(files[name]) for name in package if name.endswith(".safetensors")) <= MOST_WEIGHTS
    assert wheel.stat().st_size < MOST_BYTES
    assert "minidl/py.typed" in package
    assert files["dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"\nRoot-Is-Purelib: true\nTag: py3-none-any\n" in files["dist-info/WHEEL"]
    assert f"\nVersion: {__version__}\n".encode() in files["dist-info/METADATA"]


def check_versions() -> None:
    """One version everywhere, and a day of the past or present at the changelog's."""
    assert set(versions().values()) == {__version__}, versions()
    assert dt.date.fromisoformat(_newest_heading()[1]) <= dt.datetime.now(dt.UTC).date()


def check_metadata(wheel: Path) -> None:
    """As an index checks it on upload."""
    from packaging.metadata import Metadata

    found = Metadata.from_email(members(wheel)["dist-info/METADATA"], validate=True)
    assert all((found.summary, found.description, found.requires_python, found.classifiers))
    assert (found.description_content_type, found.license_expression) == ("text/markdown", "MIT")


def check_same_wheel(wheel: Path, source: Path) -> None:
    """From a source the same files are built, by a backend that pip fetches."""
    with tempfile.TemporaryDirectory() as folder:
        _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, str(source)])
        (built,) = Path(folder).glob("*.whl")
        # These two name the version of the backend.
        different = dict(members(wheel).items() ^ members(built).items()).keys()
        assert different <= {"dist-info/WHEEL", "dist-info/RECORD"}, sorted(different)


def check_dockerfile(wheel: Path) -> None:
    """hadolint is content, no stage runs as root, and what .dockerignore leaves is enough for the wheel."""
    _run([str(Path(sys.executable).parent / "hadolint"), "Dockerfile"])
    text = (ROOT / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL))
    assert all(re.search(r"^USER [1-9]\d*$", stages[name], re.MULTILINE) for name in ("cpu", "cuda"))
    kept = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert set(re.findall(r"^COPY (?!--)(\S+) ", text, re.MULTILINE)) <= {".", *kept}
    with tempfile.TemporaryDirectory() as folder:
        for name in kept:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder) / name)
        check_same_wheel(wheel, Path(folder))


def interpreters() -> dict[str, str | None]:
    """The Pythons that pyproject.toml names, by version, and where they are."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    found: dict[str, str | None] = {}
    for version in re.findall(r"Python :: (3\.\d+)$", "\n".join(classifiers), re.MULTILINE):
        own = version == f"{sys.version_info[0]}.{sys.version_info[1]}"
        path = sys.executable if own else shutil.which(f"python{version}")
        starts = path and subprocess.run([path, "-c", "import ensurepip"], capture_output=True, check=False)
        found[version] = path if starts and starts.returncode == 0 else None
    return found


def check_installed(wheel: Path, python: str, *, licences: bool, write: bool) -> None:
    """In an empty environment, from an empty folder, with no GPU: the README's commands do what they say."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([python, "-m", "venv", str(folder / "env")])
        pip = [str(folder / "env" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        _run([*pip, "install", "-q", str(wheel)])
        _run([*pip, "check"])
        _check_commands(folder)
        if licences:
            _run([*pip, "install", "-q", f"{wheel}[{EXTRAS}]"])
            _check_licences(next((folder / "env" / "lib").glob("python*/site-packages")), write=write)


def _check_commands(folder: Path) -> None:
    (folder / "empty").mkdir()
    foreign = ("PYTHON", "MINIDL_", "TRITON_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    run = functools.partial(_run, cwd=folder / "empty", env=environment)
    program = str(folder / "env" / "bin" / "minidl")

    assert run([program, "--version"]).split()[-1] == __version__
    told = run([program, "doctor"])
    assert f" in {folder}/env" in told
    assert "interpreted on the CPU" in told
    assert "All requirements are met." in told

    run([program, "train", "text", "--data", "docstrings", "--out", "runs/first"])
    report = json.loads((folder / "empty/runs/first/report.json").read_text())
    accuracy, linear = report["accuracy"], report["baseline"]["linear"]["accuracy"]
    assert accuracy > 0.95 * linear, f"accuracy {accuracy:.3f}, of the linear model {linear:.3f}"
    (answer,) = run([program, "predict", "runs/first", "Open a socket and wait for clients"]).splitlines()
    assert json.loads(answer)["label"] == "networking", answer

    run([program, "generate", "--grid", "8x8", "--out", "runs/pictures"])
    pictures = [path.read_bytes() for path in (folder / "empty/runs/pictures").glob("seed-*.png")]
    assert len(pictures) == len(set(pictures)) == 64
    mean = "from PIL import Image, ImageStat; print(ImageStat.Stat(Image.open('runs/pictures/grid.png')).mean[0])"
    ink = float(run([str(folder / "env/bin/python"), "-c", mean]))
    assert 20 < ink < 60, f"the mean of a grid of digits is {ink}"  # 33 of MNIST


def _check_licences(packages: Path, *, write: bool) -> None:
    found = {d.name: _licence(d.metadata) for d in importlib.metadata.distributions(path=[str(packages)])}
    rows = {name: terms for name, terms in found.items() if not name.startswith(OF_CUDA)}
    for name in ("minidl", "pip"):
        rows.pop(name)
    unknown = {name: terms for name, terms in rows.items() if not set(_terms(terms)) <= PERMISSIVE}
    assert not unknown, f"no known permissive licence: {unknown}"
    lines = [f"| {name} | {rows[name]} |" for name in sorted(rows, key=str.lower)]
    page = LICENCES.read_text()
    if write:
        page = re.sub(r"(?<=\| --- \| --- \|\n).*\Z", "\n".join(lines) + "\n", page, flags=re.DOTALL)
        LICENCES.write_text(page)
    missing = sorted(set(lines) - set(page.splitlines()))
    assert not missing, "not in docs/licences.md, which --write renews:\n" + "\n".join(missing)


def _licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """A package's licence in terms of SPDX where its metadata have that, else as they call it."""
    read = metadata.json
    classifiers = [line.rpartition(" :: ")[2] for line in read.get("classifier", ()) if line.startswith("License")]
    named = [OLDER.get(name, name) for name in classifiers]
    return read.get("license_expression") or " AND ".join(named) or read.get("license", "none")


def _terms(licence: str) -> list[str]:
    return [term for term in re.split(r" (?:AND|OR|WITH) |[()]", licence) if term]


def _run(command: list[str], **options: object) -> str:
    """Standard output of a command; raises AssertionError, with all that it printed, unless it ends well."""
    done = subprocess.run(command, **{"cwd": ROOT, **options}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--write", action="store_true", help="write the table of docs/licences.md anew")
    write = parser.parse_args().write

    (wheel,), (sdist,) = DIST.glob("minidl-*.whl"), DIST.glob("minidl-*.tar.gz")
    checks: dict[str, Callable[[], None]] = {
        "version": check_versions,
        "contents of the wheel": lambda: check_wheel(wheel),
        "metadata": lambda: check_metadata(wheel),
        "wheel from the source distribution": lambda: check_same_wheel(wheel, sdist),
        "Dockerfile": lambda: check_dockerfile(wheel),
    }
    own = True
    for version, python in interpreters().items():
        if python is None:
            print(f"Python {version}: none on PATH, not tried")
            continue
        checks[f"installed, Python {version}"] = functools.partial(
            check_installed, wheel, python, licences=own, write=write
        )
        own = False
    failed = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            check()
        except Exception:  # noqa: BLE001 (whatever it is, it is shown, and the other checks go on)
            failed.append(name)
            traceback.print_exc()
        print(f"{name}: {'failed' if name in failed else 'good'}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(f"release-check: {', '.join(failed)} failed" if failed else 0)


if __name__ == "__main__":
    main()
