"""What the interpreter computes for every operation's examples, to be compared with what a GPU computes for them.

    python -m tests.agreement write FILE                  on a CPU
    python -m tests.agreement compare FILE [--json OUT]   on a GPU: a table, and exit status 1 where they disagree

Both are within the bound of the float64 reference, so that they differ by at most twice the bound. The table says for
each operation and type how many values have the same bits, and the largest difference as a share of twice the bound.
"""

import datetime as dt
import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import load_file, save_file

from minidl.runtime import launch
from minidl.testing.compare import as_tuple
from minidl.testing.specs import all_specs
from minidl.testing.specs.make import SIZES
from tests import battery

DTYPES = (torch.float16, torch.float32, torch.float64)
# A GPU's suite draws from fewer sizes; here both sides need the same examples.
battery.EXTENTS = SIZES
app = typer.Typer(add_completion=False, help=__doc__)


def problems():
    """(name, problem) of each example, in the types that the interpreter has."""
    for op, spec in track(list(all_specs().items()), description="operations", console=Console(stderr=True)):
        for dtype in DTYPES:
            if dtype in spec.dtypes:
                for name, problem in battery.examples(spec, dtype).items():
                    yield f"{op}/{battery.NAMES[dtype]}/{name}", problem


def results(problem):
    """Outputs and gradients on the CPU, by name."""
    args, outputs = battery.call(problem.spec, problem.case, differentiate=bool(problem.spec.differentiable))
    if problem.spec.differentiable:
        battery.go_back(outputs, problem.cotangents)
    grads = {i: getattr(args[i], "grad", None) for i in problem.spec.differentiable}
    named = {f"output {k}": out for k, out in enumerate(outputs)}
    named |= {f"gradient {i}": grad for i, grad in grads.items() if grad is not None}
    return {name: value.data.cpu().contiguous().clone() for name, value in named.items()}


def bounds(problem):
    """How far each of `results` may be from the reference; float64 references are off by as much."""
    spec, exact, reference = problem.spec, problem.exact, problem.reference
    found = as_tuple(spec.bound(exact, reference if len(reference) > 1 else reference[0], problem.dtype))
    named = {f"output {k}": bound for k, bound in enumerate(found)}
    if spec.differentiable:
        there = [i for i in spec.differentiable if exact.args[i] is not None]
        expected = battery.reference_gradients(problem, there)
        doubled = tuple(c.double().cpu() for c in problem.cotangents)
        every = tuple(expected.get(i) for i in spec.differentiable)
        found = spec.grad_bound(exact, doubled[0] if len(doubled) == 1 else doubled, every, problem.dtype)
        named |= {f"gradient {i}": bound for i, bound in zip(spec.differentiable, found, strict=True)}
    factor = 2 if problem.dtype == torch.float64 else 1
    return {
        name: factor * torch.as_tensor(bound, dtype=torch.float64) for name, bound in named.items() if bound is not None
    }


@app.command()
def write(file: Annotated[Path, typer.Argument(help="A safetensors file.")]) -> None:
    """Compute every example in the interpreter."""
    if not launch.INTERPRETED:
        raise SystemExit("write computes in the interpreter: set TRITON_INTERPRET=1")
    tensors = {}
    for name, problem in problems():
        inputs = [t.cpu().contiguous().clone() for t in problem.case.tensors()]
        tensors |= {f"{name}/input {k}": value for k, value in enumerate(inputs)}
        tensors |= {f"{name}/{what}": value for what, value in results(problem).items()}
    save_file(tensors, file)
    print(f"{len(tensors)} tensors, {file.stat().st_size / 2**20:.1f} MiB")


@app.command()
def compare(
    file: Annotated[Path, typer.Argument(help="What `write` has written.")],
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the table here.")] = None,
) -> None:
    """Compute every example here, and compare."""
    if launch.INTERPRETED:
        raise SystemExit("compare is for a GPU, and this process interprets kernels")
    written = load_file(file)
    left = set(written)
    rows: dict[str, dict[str, float]] = {}
    for name, problem in problems():
        for k, value in enumerate(problem.case.tensors()):
            left.discard(f"{name}/input {k}")
            assert battery.same_bits(value.cpu(), written[f"{name}/input {k}"]), (
                f"{name}: input {k} is another one here"
            )
        row = rows.setdefault(name.rpartition("/")[0], {"values": 0, "same_bits": 0, "share_of_bound": 0.0})
        allowed = bounds(problem)
        for what, here in results(problem).items():
            there = written[f"{name}/{what}"]
            left.discard(f"{name}/{what}")
            row["values"] += here.numel()
            row["same_bits"] += int(equal(here, there).sum())
            row["share_of_bound"] = max(row["share_of_bound"], share(here, there, allowed[what]))
    show(rows)
    if json_ is not None:
        about = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": version("triton"),
            "date": dt.date.today().isoformat(),
        }  # fmt: skip
        json_.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if left:
        raise SystemExit(f"{len(left)} tensors of {file} were not compared, such as {min(left)}")
    if any(row["share_of_bound"] > 1 for row in rows.values()):
        raise SystemExit(1)


def equal(here, there):
    """Which values are the same, zeros with their sign; NaN is one value."""
    return ((here == there) & (here.signbit() == there.signbit())) | (here.isnan() & there.isnan())


def share(here, there, bound):
    """The largest difference as a share of twice the bound; infinite where there must be none, or no bound is known."""
    if here.numel() == 0:
        return 0.0
    same = (here == there) | (here.isnan() & there.isnan())
    difference = torch.where(same, 0.0, (here.double() - there.double()).abs()).nan_to_num(nan=torch.inf)
    allowed = 2 * bound.expand(here.shape)
    return torch.where(difference == 0, 0.0, (difference / allowed).nan_to_num(nan=torch.inf)).max().item()


def show(rows):
    names = [battery.NAMES[dtype] for dtype in DTYPES]
    table = Table("operation", *(f"{name}: same bits, share" for name in names))
    for op in dict.fromkeys(name.rpartition("/")[0] for name in rows):
        cells = [rows.get(f"{op}/{name}") for name in names]
        table.add_row(op, *("" if c is None else f"{part(c):.1%}  {c['share_of_bound']:.3f}" for c in cells))
    Console(width=120).print(table)
    values, equal = (sum(row[k] for row in rows.values()) for k in ("values", "same_bits"))
    worst = max(row["share_of_bound"] for row in rows.values())
    print(f"{values:,} values, {equal / values:.1%} with the same bits, at most {worst:.3f} of twice the bound apart")


def part(row):
    return row["same_bits"] / max(1, row["values"])


if __name__ == "__main__":
    app()
