"""What this machine can run, and what is missing: one check per line, with advice."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

GOOD, NOTE, BAD = "good", "note", "bad"
NO_COMPILER = "With a C compiler (gcc, clang or pip install ziglang) commands compile them, 10 times as fast."
# The lowest versions in pyproject.toml, and the tested ones in constraints.txt.
NEEDED = {"torch": "2.11", "triton": "3.6", "numpy": "1.26"}
TESTED = {"torch": "2.13.0", "triton": "3.7.1", "numpy": "2.4.6"}
PLOTS = ("matplotlib",)
ARROW = ("pyarrow",)
ONNX = ("onnx", "onnxruntime", "onnxscript")
NOTEBOOKS = ("ipykernel", "jupytext", "nbclient", "nbformat")
ENOUGH_DISK = 2 * 2**30


@dataclass(frozen=True)
class Check:
    """The result of a check. `status` is "good", "note" (a limit) or "bad" (something needed does not work).

    `advice` says what to do.
    """

    name: str
    status: str
    text: str
    advice: str = ""


def checks() -> Iterator[Check]:
    """Run all checks and yield their results. A check that raises is "bad" and shows the error."""
    every: dict[str, Callable[[], Check | list[Check]]] = {
        "python": lambda: Check("Python", GOOD, f"{platform.python_version()} in {sys.prefix}"),
        **{name: partial(_version, name) for name in NEEDED},
        "devices": _devices, "kernels": _kernels, "tiles": _tiles, "compiler": _compiler,
        "plots": partial(_extra, "plots", PLOTS, "curves and confusion matrices are not drawn"),
        "arrow": partial(_extra, "arrow", ARROW, ".zst, .parquet, .arrow and .feather files cannot be read"),
        "onnx": partial(_extra, "onnx", ONNX, "models cannot be exported to ONNX"),
        "notebooks": partial(_extra, "notebooks", NOTEBOOKS, "notebooks cannot be executed"),
        "data": _data, "threads": _threads, "disk": _disk, "self test": _self_test,
    }  # fmt: skip
    for name, check in every.items():
        try:
            result = check()
        except Exception as error:  # noqa: BLE001 (a check reports any error)
            result = Check(name, BAD, f"{type(error).__name__}: {error}", "Fix the error in this line.")
        yield from result if isinstance(result, list) else [result]


def _version(name: str) -> Check:
    if name == "triton" and sys.platform != "linux":
        return Check(name, BAD, f"none for {sys.platform}", "Triton is published for Linux: use Linux or WSL 2.")
    try:
        installed = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Check(name, BAD, "not installed", f'Install it: pip install -c constraints.txt "{name}>={NEEDED[name]}"')
    if _numbers(installed) < _numbers(NEEDED[name]):
        return Check(name, BAD, installed, f"minidl needs {name} {NEEDED[name]} or newer.")
    is_tested = installed.split("+")[0] == TESTED[name]
    advice = "" if is_tested else f"Supported; the tested version is {TESTED[name]} (constraints.txt)."
    return Check(name, GOOD if is_tested else NOTE, installed, advice)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _devices() -> Check | list[Check]:
    import torch

    from minidl.training.process import environment

    driver = environment.driver()
    if not torch.cuda.is_available():
        if driver is None:
            return Check("GPU", NOTE, "none", "Kernels run on the CPU. Use an NVIDIA GPU to train large models.")
        if torch.version.cuda is None:
            advice = "Install a torch built for CUDA: pip install -c constraints.txt torch"
            return Check("GPU", BAD, f"driver {driver}, but torch {torch.__version__} is built without CUDA", advice)
        advice = f"torch is built for CUDA {torch.version.cuda}: update the driver, or check CUDA_VISIBLE_DEVICES."
        return Check("GPU", BAD, f"driver {driver}, but torch sees no device", advice)
    results = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        text = (
            f"{device.name}, compute capability {device.major}.{device.minor}, {device.total_memory / 2**30:.0f} GiB, "
            f"{device.multi_processor_count} processors, driver {driver}, CUDA {torch.version.cuda}"
        )
        too_old = (device.major, device.minor) < (8, 0)
        advice = "minidl's GPU kernels need 8.0 or above; set TRITON_INTERPRET=1 to use the CPU." if too_old else ""
        results.append(Check(f"GPU {index}", BAD if too_old else GOOD, text, advice))
    return results


def _kernels() -> Check:
    import torch

    setting = os.environ.get("TRITON_INTERPRET")
    from minidl.cpu import build
    from minidl.runtime import launch

    if launch.COMPILED_CPU:
        compiler = build.compiler()
        if compiler is None:
            return Check("kernels", BAD, "to be compiled for the CPU, but there is no C compiler", NO_COMPILER)
        return Check("kernels", GOOD, f"compiled for the CPU by {compiler.name}, because MINIDL_CPU=compiled is set")
    if not launch.INTERPRETED:
        why = "a CUDA device is present" if setting is None else f"TRITON_INTERPRET={setting} is set"
        if not torch.cuda.is_available():
            advice = "Unset TRITON_INTERPRET: without a CUDA device only the interpreter runs kernels."
            return Check("kernels", BAD, f"compiled: {why}, but there is no CUDA device", advice)
        return Check("kernels", GOOD, f"compiled, because {why}; tile table {launch.target()}")
    if torch.cuda.is_available():
        advice = "Unset TRITON_INTERPRET to use the GPU."
        return Check("kernels", NOTE, f"interpreted on the CPU, because TRITON_INTERPRET={setting} is set", advice)
    compiler = build.compiler()
    if compiler is None:
        return Check("kernels", NOTE, "interpreted on the CPU, because there is no CUDA device", NO_COMPILER)
    if os.environ.get("MINIDL_CPU") == "interpreted":
        advice = f"Unset it: commands compile them with {compiler.name}, 10 times as fast."
        return Check("kernels", NOTE, "interpreted on the CPU, because MINIDL_CPU=interpreted is set", advice)
    text = f"compiled for the CPU by {compiler.name} in commands; interpreted in Python"
    return Check("kernels", GOOD, text, "Set MINIDL_CPU=compiled to compile them in Python, too.")


def _tiles() -> list[Check]:
    """Return the check of the tile tables if MINIDL_TILES names a folder."""
    from minidl.runtime import tile_tables
    from minidl.runtime.cost_model import devices

    if tile_tables.CHOSEN is None:
        return []
    try:
        devices.check()
    except tile_tables.TableError as error:
        return [Check("tile tables", BAD, f"{error.filename}: {error.strerror}", f"Or unset {tile_tables.VARIABLE}.")]
    names = [path.stem for path in sorted(tile_tables.FOLDER.glob("*.json")) if tile_tables.file_of(path.stem) != path]
    names += ["estimates"] * (devices.tuned_file() is not None)
    if not names:
        advice = f"The package's are used; `minidl tune` makes others, or unset {tile_tables.VARIABLE}."
        return [Check("tile tables", NOTE, f"none in {tile_tables.CHOSEN}", advice)]
    return [Check("tile tables", GOOD, f"{', '.join(names)} in {tile_tables.CHOSEN}")]


def _compiler() -> Check:
    import torch

    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler:
        return Check("C compiler", GOOD, compiler)
    if torch.cuda.is_available():
        advice = "Triton builds its launcher with gcc or clang at the first launch: install one, or name it in CC."
        return Check("C compiler", BAD, "none", advice)
    return Check("C compiler", GOOD, "none; only Triton's GPU launcher needs one")


def _extra(name: str, packages: tuple[str, ...], without: str) -> Check:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if not missing:
        return Check(name, GOOD, "installed")
    return Check(name, NOTE, f"{', '.join(missing)} missing: {without}", f"pip install {' '.join(missing)}")


def _data() -> list[Check]:
    from minidl.data import TABLE_DATA, TEXT_DATA, reuters
    from minidl.data.download import cache_folder

    built_in = [name for name, text in {**TEXT_DATA, **TABLE_DATA}.items() if "no download" in text]
    results = [Check("data", GOOD, f"{', '.join(built_in)}: no download")]
    setting = os.environ.get("MINIDL_DATA")
    if setting and not Path(setting).is_dir():
        results.append(Check("MINIDL_DATA", BAD, f"{setting} is not a folder", "Set it to a folder, or unset it."))
    folders = [*([Path(setting)] if setting else []), cache_folder()]
    present = [folder for folder in folders if (folder / reuters.RESOURCE.path).exists()]
    if present:
        results.append(Check("reuters", GOOD, str(present[0] / reuters.RESOURCE.path)))
    else:
        expected = " nor ".join(str(folder / reuters.RESOURCE.path) for folder in folders)
        advice = "The first use downloads it; offline, put it there or set MINIDL_DATA."
        results.append(
            Check("reuters", NOTE, f"neither {expected}" if len(folders) > 1 else f"not at {expected}", advice)
        )
    return results


def _threads() -> Check:
    from minidl.training.process.environment import thread_count

    processors = len(os.sched_getaffinity(0))
    text = f"{thread_count()} for BLAS and torch, {processors} processors"
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > processors:
        return Check("threads", NOTE, text, f"OMP_NUM_THREADS={setting} is more than this process may use: lower it.")
    return Check("threads", GOOD, text)


def _disk() -> list[Check]:
    import triton

    from minidl.data.download import cache_folder

    results = []
    for name, folder in (
        ("disk, runs", Path.cwd()),
        ("disk, data", cache_folder()),
        ("disk, Triton", Path(triton.knobs.cache.dir)),
    ):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        text = f"{free / 2**30:.1f} GiB free for {folder}"
        if not os.access(existing, os.W_OK):
            results.append(Check(name, BAD, f"{existing} cannot be written", f"Make it writable, for {folder}."))
        elif free < ENOUGH_DISK:
            advice = "Compiled kernels, data and runs take up to 2 GiB: free some space."
            results.append(Check(name, NOTE, text, advice))
        else:
            results.append(Check(name, GOOD, text))
    return results


def _self_test() -> list[Check]:
    """Compare a product and its softmax in each dtype with torch in float64."""
    import torch

    from minidl import ops
    from minidl.runtime import launch
    from minidl.tensors import Tensor, default_device
    from minidl.testing.compare import Expected
    from minidl.testing.specs import Case, all_specs

    device, results = default_device(), []
    for dtype in [torch.float32] if launch.INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]:
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(size, generator=generator).to(dtype).to(device) for size in ((144, 208), (208, 160)))
        start = time.perf_counter()
        product = ops.matmul(Tensor(a), Tensor(b))
        probabilities = ops.softmax(product, -1)
        right = 0 < float(probabilities.data.max()) <= 1  # waits for the device
        seconds, figures = time.perf_counter() - start, []
        for name, args, result in (
            ("matmul", (a, b), product.data),
            ("softmax", (product.data, -1), probabilities.data),
        ):
            expected = Expected(all_specs()[name], Case(args), dtype)
            right = right and expected.holds(result)
            figures.append(f"{name} off by {float((result.double() - expected.exact[0]).abs().max()):.1e}")
        text = f"{', '.join(figures)}; {seconds:.2f} s{'' if str(device) == 'cpu' else ' with compilation'}"
        advice = "" if right else "Rounding does not explain this error: run the tests before trusting results."
        results.append(Check(f"self-test {str(dtype).removeprefix('torch.')}", GOOD if right else BAD, text, advice))
    return results
