"""What each form and rewrite of a convolution is worth. Needs no GPU.

    python -m benchmarks.forms > benchmarks/forms.md

Every problem is planned with all forms and again without one. The loss is the ratio of the two estimated times of an
H200: the geometric mean over the layers of published networks (at 1, 8, 32 and 256 images, in three directions) in
float16 and in float32, and in float16 the largest geometric mean over a group of drawn rows, and the measured lead over
cuDNN of the layers of `minidl bench`, divided by the ratio of estimates.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from minidl.kernels.conv import forms, plan
from minidl.kernels.conv.problem import FORWARD, GRAD_WEIGHT, TRANSPOSED, Problem
from minidl.runtime import launch
from minidl.runtime.cost_model import devices, selection
from minidl.testing.cases.convolutions import BENCHMARK
from minidl.testing.cases.transposed import BENCHMARK as TRANSPOSED_BENCHMARK
from minidl.tools.tuning import drawn, drawn_conv, published
from minidl.tools.tuning.shapes import Conv

DEVICE, TARGET, DTYPE = "NVIDIA H200", "sm_90", torch.float16
RESULTS = Path(__file__).parent / "results"
BATCHES = 1, 8, 32, 256
KINDS = "conv", "conv1d", "conv_transpose"
PUBLISHED, FLOAT32 = "published", "published, float32"
# A form or rewrite stays if one of these is lost without it.
PUBLISHED_LOSS, GROUP_LOSS, CUDNN = 1.005, 1.02, 1.0
FEWEST = 10  # rows of a group
# Layers of the courses' networks.
COURSES = (*(f"conv {name}" for name in tuple(BENCHMARK)[:4]), "transposed")
# Forms that stay for another reason.
REASONS = {
    "boxed_grad_weight": "stays: U-Net's training takes 1.1 times as long without it",
    "fft": "stays: on request, for float32 with large kernels",
    "split_box": "stays: on request, until it is measured on a GPU",
    "pair": "stays: 32->64 5x5 measured at 0.89 of cuDNN without it, 1.10 with it",
    "paired_box": "stays: layers of 64 channels of VGG-16, U-Net and DenseNet lose 5 to 55 %",
}


class Row(NamedTuple):
    """A problem, the group whose mean it counts in, and its measured lead over cuDNN (0 if not measured)."""

    problem: Problem
    group: str
    ratio: float = 0.0


def rows(processors: int) -> Iterator[Row]:
    """Yield the layers of published networks, the drawn rows, and the layers of `minidl bench`."""
    for shape in _published():
        for direction in drawn_conv.DIRECTIONS:
            for dtype, group in ((DTYPE, PUBLISHED), (torch.float32, FLOAT32)):
                yield Row(drawn_conv.problem(shape, direction, dtype, TARGET, processors), group)
    results = json.loads((RESULTS / "drawn-nvidia-h200.json").read_text())
    for row in results["rows"]:
        if row["of"] in KINDS:
            shape = drawn.draw(row["of"], results["drawn"]["seed"], row["index"])
            problem = drawn_conv.problem(shape, row["direction"], DTYPE, TARGET, processors)
            yield Row(problem, f"{row['of']}, {shape.group}, {row['direction']}")
    for problem, name in _benchmark(processors):
        measured = [r for r in json.loads((RESULTS / "nvidia-h200.json").read_text())["rows"] if r["row"] == name]
        if measured:
            yield Row(problem, name, measured[0]["ratio"])


def _published() -> Iterator[Conv]:
    for batch in BATCHES:
        for source, channels, outputs, size, kernel, *how, groups in published.CONV:
            stride, padding, dilation = map(_pair, how)
            yield Conv(batch, channels, outputs, _pair(size), _pair(kernel), stride, padding, dilation, groups, source)
        for source, channels, outputs, size, kernel, *how, groups in published.CONV_TRANSPOSE:
            stride, padding, ends = map(_pair, how)
            sizes = _pair(size), _pair(kernel), stride, padding, (1, 1)
            yield Conv(batch, channels, outputs, *sizes, groups, source, True, ends)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def _benchmark(processors: int) -> Iterator[tuple[Problem, str]]:
    on = {"target": TARGET, "processors": processors}
    for name, case in BENCHMARK.items():
        relu = name in tuple(BENCHMARK)[:3]
        problem = Problem(FORWARD, case.geometry, case.N, case.C, case.M, DTYPE, **on)
        yield problem._replace(bias=relu, act="relu" if relu else None), f"conv {name}"
        strides = (case.kernel**2 * case.C, 1, case.kernel * case.C, case.C)
        back = problem._replace(direction=TRANSPOSED, C=case.M, M=case.C, strides=strides)
        yield back, f"conv {name} gradient of the input"
        yield problem._replace(direction=GRAD_WEIGHT), f"conv {name} gradient of the weight"
    for _, C, M, size, *_ in TRANSPOSED_BENCHMARK:
        case = next(each for each in TRANSPOSED_BENCHMARK if (each.C, each.M) == (C, M))
        strides = (25 * M, 1, 5 * M, M)
        act = "tanh" if M <= 4 else "relu"
        problem = Problem(
            TRANSPOSED, case.geometry, case.N, C, M, DTYPE, bias=True, act=act, strides=strides, **on
        )  # fmt: skip
        yield problem, f"transposed 5x5 stride 2 {C}->{M}@{size}"


def names() -> list[str]:
    """Return the names of all form modules and rewrites."""
    return [_module(form) for form in forms.FORMS] + [rewrite.name for rewrite in forms.REWRITES if rewrite.name]


def _module(form: Any) -> str:
    return str(form.__name__.rpartition(".")[2])


@contextlib.contextmanager
def without(*removed: str) -> Iterator[None]:
    """A context in which plans use none of these forms and rewrites."""
    before = forms.FORMS, forms.REWRITES
    forms.FORMS = tuple(form for form in forms.FORMS if _module(form) not in removed)
    forms.REWRITES = tuple(rewrite for rewrite in forms.REWRITES if rewrite.name not in removed)
    launch.forget()
    try:
        yield
    finally:
        forms.FORMS, forms.REWRITES = before
        launch.forget()


def used(chosen: plan.Plan) -> set[str]:
    """Return the names of the forms and rewrites of a plan."""
    if isinstance(chosen, plan.FormPlan):
        return {_module(chosen.form)}
    assert isinstance(chosen, plan.RewritePlan)
    return {chosen.rewrite.name}.union(*map(used, chosen.parts))


class Loss(NamedTuple):
    """The row, and its estimated time without a form relative to that with all; infinite if no form is able."""

    row: Row
    factor: float


def losses(every: list[Row]) -> dict[str, list[Loss]]:
    """Return, by name, the rows whose plans use a form or rewrite, with their losses."""
    best = [(row, plan.cheapest(row.problem)) for row in every]
    result = {}
    for name in names():
        with without(name):
            result[name] = [
                Loss(row, _time(row.problem) / chosen.microseconds)
                for row, chosen in best
                if chosen is not None and name in used(chosen)
            ]
    return result


def _time(problem: Problem) -> float:
    chosen = plan.cheapest(problem)
    return math.inf if chosen is None else chosen.microseconds


def summary(name: str, lost: list[Loss], sizes: dict[str, int]) -> tuple[list[str], bool]:
    """Return the cells of a form's row, and whether it stays."""
    in_published = [loss.factor for loss in lost if loss.row.group == PUBLISHED]
    mean = _mean(in_published, sizes[PUBLISHED])
    in_float32 = _mean((loss.factor for loss in lost if loss.row.group == FLOAT32), sizes[FLOAT32])
    groups = {loss.row.group for loss in lost if not loss.row.ratio} - {PUBLISHED, FLOAT32}
    by_group = {
        group: _mean((loss.factor for loss in lost if loss.row.group == group), sizes[group])
        for group in sorted(groups) if sizes[group] >= FEWEST
    }  # fmt: skip
    group = max(by_group, key=lambda key: by_group[key], default="")
    layers = [loss for loss in lost if loss.row.ratio and loss.factor > 1.01]
    courses = [loss for loss in layers if loss.row.group.startswith(COURSES)]
    behind = [loss for loss in courses if loss.row.ratio / loss.factor < CUDNN <= loss.row.ratio]
    stays = max(mean, in_float32) >= PUBLISHED_LOSS or by_group.get(group, 1.0) >= GROUP_LOSS or bool(behind)
    listed = "; ".join(
        f"{loss.row.group}: {loss.row.ratio:.2f} -> {loss.row.ratio / loss.factor:.2f}"
        for loss in sorted(layers, key=lambda each: -each.factor)[:3]
    )
    cells = [
        name, str(_lines(name)), str(len(in_published)), _factor(mean), _factor(in_float32),
        _factor(max(in_published, default=1.0)),
        f"{_factor(by_group[group])} ({group})" if group else "1.000", listed,
        "stays" if stays else REASONS.get(name, "goes"),
    ]  # fmt: skip
    return cells, stays


def _mean(factors: Iterable[float], rows_: int) -> float:
    every = list(factors)
    return math.inf if math.inf in every else geometric_mean([*every, *[1.0] * (rows_ - len(every))])


def _factor(value: float) -> str:
    return "no other form" if value == math.inf else f"{value:.3f}"


def _lines(name: str) -> int:
    """Return the lines of the module of a form or rewrite."""
    module = next((f for f in forms.FORMS if _module(f) == name), None)
    if module is None:
        rewrite = next(r for r in forms.REWRITES if r.name == name)
        module = sys.modules[type(rewrite).__module__]
    return len(Path(module.__file__).read_text().splitlines())


HEAD = (
    "form or rewrite", "lines", "published layers", "geometric mean without", "in float32", "worst",
    "worst drawn group",
    "layers of `minidl bench` (lead over cuDNN)", "",
)  # fmt: skip


def main() -> None:
    """Print the table."""
    entry = devices.of_name(DEVICE)
    assert entry is not None
    constants, figures = entry
    with selection.use(constants):
        every = list(rows(int(figures.processors)))
        sizes: dict[str, int] = {}
        for row in every:
            sizes[row.group] = sizes.get(row.group, 0) + 1
        table = [summary(name, lost, sizes)[0] for name, lost in losses(every).items()]
    print(f"# What the forms of a convolution are worth\n\n{(__doc__ or '').partition('Every problem')[0].strip()}\n")
    print(f"{sizes['published']} published layers, {len(every)} problems in all.\n")
    for cells in (HEAD, ["---"] * len(HEAD), *table):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
