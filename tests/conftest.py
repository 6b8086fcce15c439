"""Where the suite runs, how many examples it draws, and the `device` fixture.

pytest --device cpu        kernels in Triton's interpreter, also on a machine with a GPU
pytest --device compiled   kernels compiled for the CPU
pytest --device cuda       compiled kernels; fails without a CUDA device (the default takes one if there is one)
pytest --third WORD        a third of the tests, drawn by a word
pytest --sanitize          every load and store of each test's kernels is checked (minidl.testing.sanitize)
--hypothesis-profile NAME  ci (the default on a CPU): the same examples in every run
                           gpu (the default on a GPU): fewer sizes, since each distinct tile is compiled
                           sanitize (the default with --sanitize): fewer examples
                           nightly: many new examples
"""

import gc
import hashlib
import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
_PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)

for _name, _examples, _derandomize in (
    ("ci", 8, True),
    ("gpu", 6, True),
    ("sanitize", 3, True),
    ("nightly", 200, False),
):
    settings.register_profile(
        _name,
        max_examples=_examples,
        derandomize=_derandomize,
        deadline=None,
        print_blob=not _derandomize,
        suppress_health_check=_SLOW_IS_FINE,
        phases=_PHASES,
    )


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        choices=("auto", "cpu", "compiled", "cuda"),
        default="auto",
        help="cpu (interpreted), compiled (for the CPU), cuda, or auto (cuda where there is a device, or cpu)",
    )
    parser.addoption("--third", metavar="WORD", help="run a third of the tests, drawn by this word")
    parser.addoption(
        "--sanitize", action="store_true", help="check the memory that kernels touch, in Triton's interpreter"
    )


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what is in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    wanted = config.getoption("--device")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device")
    if wanted != "auto":
        os.environ["TRITON_INTERPRET"] = "1" if wanted == "cpu" else "0"
    os.environ["MINIDL_CPU"] = "compiled" if wanted == "compiled" else "interpreted"
    from minidl.runtime import launch

    if wanted != "auto" and (wanted == "cpu") != launch.INTERPRETED:
        raise pytest.UsageError(f"--device {wanted}: Triton was imported before the suite could choose")
    sanitize = config.getoption("--sanitize")
    if sanitize and not launch.INTERPRETED:
        raise pytest.UsageError("--sanitize checks interpreted kernels: add --device cpu")
    if not config.getoption("--hypothesis-profile", None):
        settings.load_profile("sanitize" if sanitize else "ci" if launch.ON_CPU else "gpu")


def pytest_collection_modifyitems(config, items):
    from minidl.runtime import launch

    word = config.getoption("--third")
    if word is not None:
        drawn: tuple[list[pytest.Item], ...] = [], [], []
        for item in items:
            drawn[hashlib.sha256(f"{word} {item.nodeid}".encode()).digest()[0] % 3].append(item)
        items[:] = drawn[0]
        config.hook.pytest_deselected(items=[*drawn[1], *drawn[2]])

    if launch.COMPILED_CPU:
        from minidl.cpu import build

        for item in items if build.compiler() is None else []:
            item.add_marker(pytest.mark.skip(reason="no C compiler"))
    if launch.ON_CPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device with compiled kernels"))


def pytest_collection_finish():
    """Each full collection of garbage would look at 12,000 collected tests: a tenth of the run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def device():
    """Where kernels run in this process."""
    from minidl.tensors import default_device

    return default_device()


@pytest.fixture(autouse=True)
def _seeded():
    """The same numbers in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _sanitized(request):
    if not request.config.getoption("--sanitize") or request.node.get_closest_marker("unsanitized"):
        yield
        return
    from minidl.testing import sanitize

    with sanitize(stop=True):
        yield
