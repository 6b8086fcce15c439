"""torch's own test data through minidl: every name of OpInfo and ModuleInfo that minidl has, too.

python -m tests.torch_code.names            writes docs/torch_names.md anew
python -m tests.torch_code.names add Linear tells of these names and writes nothing

Samples are float32. The reference is torch in float64 on the same numbers. A sample passes where results, in shape and
dtype, and the gradients of all inputs and parameters are within the bound of `within`; it is refused where minidl
raises a ValueError, TypeError, IndexError or NotImplementedError whose text names the operation or an argument of the
call; anything else differs.
"""

import functools
import inspect
import itertools
import re
import sys
import types
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import minidl
from minidl import nn, no_grad, ops
from minidl.tensors import Tensor
from tests.torch_code.reasons import OWN, UNCOMPARED, WITHOUT_DATA, reason

PAGE = Path(__file__).parents[2] / "docs" / "torch_names.md"
SAMPLES, ELEMENTS = 8, 2000  # of a name, and of a sample: kernels are interpreted
NARROW = 3  # samples of a name in float16
REFUSALS = (ValueError, TypeError, IndexError, NotImplementedError)
# OpInfos that give the arguments in another order than torch's function takes them.
ARRANGED: dict[str, Callable[[Any], Any]] = {
    "einsum": lambda f: lambda tensors, equation: f(equation, *tensors),
    "where": lambda f: lambda x, condition, other: f(condition, x, other),
    "nn.functional.embedding": lambda f: lambda weight, indices, **named: f(indices, weight, **named),
    "nn.functional.embedding_bag": lambda f: lambda weight, indices, **named: f(indices, weight, **named),
}
FLOATS = (torch.float32, torch.float16)

HEAD = """# Torch's test data

This page shows, for each name that both libraries have, how minidl handles PyTorch's own test samples; look here to
see whether a function behaves as in PyTorch.

The samples are PyTorch {torch}'s OpInfo and ModuleInfo in float32: up to {samples} of each, with at most {elements}
elements. The comparison covers results and the gradients of all inputs and parameters.

- **pass**: shapes and dtypes are PyTorch's, and all values are within the error bound of float32 arithmetic around
  PyTorch's float64 values.
- **refused**: minidl raises an error that names the unsupported argument.
- **differ**: everything else. A test fails for any difference without a documented reason.

Of {total} samples {passes} pass ({share:.1f} %), {refused} are refused, {differs} differ. In float16, with {narrow}
samples of each OpInfo, {narrow_passes} of {narrow_total} pass. `python -m tests.torch_code.names` writes this page.

| name | pass | refused | differ | details |
|---|---|---|---|---|
"""
WRONG = """

## Wrong calls

PyTorch's data also has calls that PyTorch rejects. Of {calls} such calls, minidl rejects {same} with an error that
names the function or the unsupported argument. It accepts the others:

| name | reason |
|---|---|
"""
MIDDLE = """

## Without test data

PyTorch has no samples for these names, or they are minidl's own. A [spec](glossary.md) or a test covers each of them.

| name | description |
|---|---|
"""


def databases() -> tuple[list[Any], list[Any]]:
    """torch's OpInfos and ModuleInfos.

    Their modules ask for expecttest, which compares texts in torch's own tests and is not needed here, and forbid
    settings of torch's backends for the rest of the process.
    """
    if "expecttest" not in sys.modules:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    forbid, torch.backends.disable_global_flags = torch.backends.disable_global_flags, lambda: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.testing._internal.common_methods_invocations import op_db
            from torch.testing._internal.common_modules import module_db
    finally:
        torch.backends.disable_global_flags = forbid
    return op_db, module_db


@dataclass
class Row:
    """What became of the samples of a name."""

    label: str
    passes: int = 0
    refuses: Counter[str] = field(default_factory=Counter)
    differs: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return self.passes + self.refuses.total() + self.differs.total()

    def add(self, other) -> None:
        self.passes += other.passes
        self.refuses += other.refuses
        self.differs += other.differs


class DiffersError(Exception):
    """How a sample differs."""


def each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with each torch tensor in it changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(each(item, change) for item in value)
    return {k: each(v, change) for k, v in value.items()} if isinstance(value, dict) else value


class Call:
    """A sample's arguments for one framework, and the leaves among them."""

    def __init__(self, args: Any, kwargs: Any, framework: str) -> None:
        self.framework, self.leaves = framework, []
        self.args, self.kwargs = each(args, self._made), each(kwargs, self._made)
        if framework == "exact":
            self.args, self.kwargs = self._wide(self.args), {k: self._wide(v) for k, v in self.kwargs.items()}

    @staticmethod
    def _wide(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(Call._wide, value))
        return torch.float64 if value in FLOATS else value

    def _made(self, tensor: torch.Tensor) -> Any:
        data = tensor.detach()
        wants = tensor.requires_grad
        if self.framework == "exact" and data.dtype in FLOATS:
            data = data.double()
        if self.framework == "minidl" and not wants and data.is_contiguous():
            data = data.clone()  # a batch norm moves its running statistics, which torch has saved by then
        made = Tensor(data, wants) if self.framework == "minidl" else data.requires_grad_(wants)
        if wants:
            self.leaves.append(made)
        return made


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [part for item in value for part in flat(item)]
    return [value]


def within(got: torch.Tensor, exact: torch.Tensor, peer: torch.Tensor, variables: list[torch.Tensor]) -> None:
    """Raise where `got` is further from `exact` than its type allows.

    Each rounding on the way counts for a relative change by a unit, 2^-24 or 2^-11, of an input or of the result. A
    chain of them is no longer than twice the inputs that the element depends on, with 16 for functions like exp and the
    scalars in between: gamma (|exact| + sum of |derivative by an input| |input|). Where sums cancel whatever the inputs
    are, as the gradients of norms of two elements, this bound is 0; hence 8 times the largest error that torch makes in
    that type.
    """
    peer = peer.detach()
    if got.shape != peer.shape or got.dtype != peer.dtype:
        raise DiffersError(f"{name_of(got.dtype)} {list(got.shape)}, torch's {name_of(peer.dtype)} {list(peer.shape)}")
    value = exact.detach()
    same = (got == peer) | (got.isnan() & peer.isnan())
    if not got.dtype.is_floating_point:
        if not same.all():
            raise DiffersError("other values")
        return
    # Of results in float64, for which there is no wider reference, no more than of float32 is asked.
    kind = torch.finfo(torch.float32 if got.dtype == torch.float64 else got.dtype)
    unit, least = kind.eps / 2, kind.smallest_normal
    error = (got.double() - value.double()).abs()
    usual = 8 * (peer.double() - value).abs().nan_to_num(0, 0, 0).max() if got.numel() else 0
    same |= (error <= 8 * unit * value.abs() + usual) | (error <= least)
    for place in (~same).reshape(-1).nonzero().reshape(-1).tolist():
        bound = 0.0
        if variables and exact.requires_grad:
            grads = torch.autograd.grad(
                exact.reshape(-1)[place], variables, retain_graph=True, materialize_grads=True, allow_unused=True
            )
            depth = 16 + 2 * sum(int(g.count_nonzero()) for g in grads)
            moved = sum(float((g * v).abs().sum().detach()) for g, v in zip(grads, variables, strict=True))
            bound = 1.01 * depth * unit * (float(value.reshape(-1)[place].abs()) + moved)
        off, at = float(error.reshape(-1)[place]), float(value.reshape(-1)[place])
        if not off <= bound:
            raise DiffersError(f"{float(got.reshape(-1)[place]):.6g} for {at:.6g}")


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(ours: Callable[[Call], Any], theirs: Callable[[Call], Any], args: Any, kwargs: Any, label: str) -> Row:
    """One sample: what `ours` and `theirs` make of a Call, given the arguments."""
    row = Row(label)
    if kwargs.get("dropout_p"):
        kwargs = {**kwargs, "dropout_p": 0.0}  # other numbers are drawn
    exact, peer, own = (Call(args, kwargs, framework) for framework in ("exact", "torch", "minidl"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, beside = flat(theirs(exact)), flat(theirs(peer))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return row  # not for float64
        try:
            _compare(exact, peer, own, expected, beside, ours, label)
            row.passes += 1
        except DiffersError as how:
            row.differs[str(how)] += 1
        except REFUSALS as error:
            told = message(error)
            (row.refuses if clear(error, label) else row.differs)[told] += 1
        except Exception as error:  # noqa: BLE001 (whatever it is, it is told)
            row.differs[f"{type(error).__name__}: {message(error)}"] += 1
    return row


def _compare(
    exact: Call, peer: Call, own: Call, expected: Any, beside: Any, ours: Callable[[Call], Any], label: str
) -> None:
    result = ours(own)
    got = flat(result)
    if len(got) != len(beside):
        raise DiffersError(f"{len(got)} results, torch's {len(beside)}")
    cotangents: list[Any] = []
    for g, e, p in zip(got, expected, beside, strict=True):
        if not isinstance(p, torch.Tensor):
            if g != p:
                raise DiffersError(f"{g!r} for {p!r}")
            continue
        if not isinstance(g, Tensor):
            raise DiffersError(f"a {type(g).__name__} for a tensor")
        if label.rpartition(".")[2] in UNCOMPARED:
            if g.shape != p.shape or g.dtype != p.dtype:
                raise DiffersError(f"{g.dtype} {list(g.shape)}, torch's {p.dtype} {list(p.shape)}")
            continue
        within(g.data, e, p, exact.leaves)
        if p.requires_grad != g.requires_grad and (exact.leaves and g.dtype.is_floating_point):
            raise DiffersError("has no gradient" if p.requires_grad else "has a gradient")
        if e.requires_grad:
            dy = torch.randn(e.shape, generator=torch.Generator().manual_seed(len(cotangents)))
            dy = dy.to(p.dtype)
            cotangents.append((g, e, p, dy, dy.to(e.dtype).clone().requires_grad_()))
    if not cotangents or not exact.leaves:
        return
    for g, _, _, dy, _ in cotangents:
        g.backward(Tensor(dy.to(g.dtype)), retain_graph=True)
    variables = [*exact.leaves, *(wide for *_, wide in cotangents)]
    grads = torch.autograd.grad(
        [e for _, e, *_ in cotangents], exact.leaves, [wide for *_, wide in cotangents],
        create_graph=True, allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    near = torch.autograd.grad(
        [p for _, _, p, _, _ in cotangents], peer.leaves, [dy for *_, dy, _ in cotangents],
        allow_unused=True, materialize_grads=True,
    )  # fmt: skip
    for position, (leaf, grad, close) in enumerate(zip(own.leaves, grads, near, strict=True)):
        found = torch.zeros_like(close) if leaf.grad is None else leaf.grad.data
        try:
            within(found, grad, close, variables)
        except DiffersError as how:
            raise DiffersError(f"gradient {position}: {how}") from None


def message(error: Exception) -> str:
    """The first line of an error without what changes from sample to sample."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"\[[\d, ]*\]|\([\d, ]*\)", "[..]", text)
    text = re.sub(r"(?<![\w.])-?\d+(\.\d+)?(?!\w)", "N", text)
    return text if len(text) <= 150 else text[:147] + "..."


def clear(error: Exception, label: str) -> bool:
    """Whether the text names what refuses: the function, the class, or what either calls, with a colon."""
    word, text = label.rpartition(".")[2].strip("_"), str(error)
    words = {part.replace("_", "").lower() for part in re.findall(r"\w+", text)}
    return word.replace("_", "").lower() in words or re.match(r"\w+: ", text) is not None


def sizes(value: Any) -> int:
    found: list[int] = []
    each(value, lambda t: found.append(t.numel()))
    return sum(found)


def small(samples: Iterator[Any], arguments: Callable[[Any], Any], most: int = SAMPLES) -> list[Any]:
    kept = (s for s in itertools.islice(samples, 60) if sizes(arguments(s)) <= ELEMENTS)
    return list(itertools.islice(kept, most))


def homes(name: str) -> dict[str, Callable[..., Any]]:
    """What minidl has under the name of an OpInfo: label, function."""
    short = name.removeprefix("nn.functional.")
    found: dict[str, Callable[..., Any]] = {}
    if "." in short or name == "unfold":  # the method; minidl has the function of images
        return found
    places = [("ops", ops)] if short != name else [("ops", ops), ("minidl", minidl), ("Tensor", Tensor)]
    for place, home in places:
        value = inspect.getattr_static(home, short, None)
        if value is None and home is minidl and short in minidl.__all__:
            value = getattr(minidl, short)
        if isinstance(value, property):
            value = value.fget
        if callable(value) and not inspect.isclass(value) and value not in found.values():
            found[f"{place}.{short}"] = value
    return found


def in_place(name: str) -> Callable[..., Any] | None:
    return getattr(Tensor, f"{name}_", None)


def run_operation(op: Any, dtype: torch.dtype = torch.float32) -> Iterator[Row]:
    """The rows of an OpInfo: the functions of its name, and the method that works in place."""
    if dtype != torch.float32 and dtype not in op.dtypes:
        return
    arranged = ARRANGED.get(op.name, lambda f: f)
    calls = [(label, arranged(f), op.op) for label, f in homes(op.name).items()]
    changes = in_place(op.name)
    if changes is not None and op.get_inplace() is not None:
        calls.append((f"Tensor.{op.name}_", changes, op.get_inplace()))
    for label, ours, theirs in calls:
        torch.manual_seed(0)
        row = Row(label)
        changed = label.endswith("_") and not label.endswith("__")
        for sample in small(
            op.sample_inputs("cpu", dtype, requires_grad=not changed and op.supports_autograd),
            lambda s: (s.input, s.args, s.kwargs),
            SAMPLES if dtype == torch.float32 else NARROW,
        ):
            if changed and getattr(sample, "broadcasts_input", False):
                continue
            args = (sample.input.clone() if changed else sample.input, *sample.args)
            row.add(compare(_called(ours, changed), _called(theirs, changed), args, sample.kwargs, label))
        yield row


def _called(function: Callable[..., Any], changed: bool) -> Callable[[Call], Any]:
    def call(c: Call) -> Any:
        if not changed:
            return function(*c.args, **c.kwargs)
        x, *rest = c.args
        x = Tensor(x.data.clone()) if isinstance(x, Tensor) else x.clone()
        with no_grad():
            return function(x, *rest, **c.kwargs)

    return call


def run_module(info: Any) -> Iterator[Row]:
    """The row of a ModuleInfo."""
    name = info.name.removeprefix("nn.")
    if not hasattr(nn, name):
        return
    row = Row(f"nn.{name}")
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=training)
        for sample in small(iter(inputs), lambda s: (s.forward_input.args, s.forward_input.kwargs)):
            if sample.forward_input is not None:
                row.add(_run_module(info.module_cls, getattr(nn, name), sample, training, row.label))
    yield row


def _run_module(theirs: Any, ours: Any, sample: Any, training: bool, label: str) -> Row:
    built, given = sample.constructor_input, sample.forward_input

    def made(kind: Any) -> Any:
        args, kwargs = (each(v, lambda t: t.detach().clone()) for v in (built.args, built.kwargs))
        return kind(*args, **kwargs).train(training)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = made(theirs)
    state = {k: v.detach().clone() for k, v in reference.state_dict().items()}

    def call_theirs(c: Call) -> Any:
        module = made(theirs)
        module.load_state_dict(state)
        if c.framework == "exact":
            module = module.double()
        c.leaves += list(module.parameters())
        return module(*c.args, **c.kwargs)

    def call_ours(c: Call) -> Any:
        module = made(ours)
        module.load_state_dict(state)
        c.leaves += list(module.parameters())
        return module(*c.args, **c.kwargs)

    return compare(call_ours, call_theirs, given.args, given.kwargs, label)


def wrong(op: Any) -> Iterator[tuple[str, str]]:
    """What became of each call of an OpInfo's that torch refuses: label, and "" for a clear error or how it differs."""
    arranged = ARRANGED.get(op.name, lambda f: f)
    for label, function in homes(op.name).items() if op.error_inputs_func else ():
        if label.startswith("Tensor.__r"):
            continue  # of a number: no call of them is
        for bad in op.error_inputs("cpu"):
            sample = bad.sample_input
            call = Call((sample.input, *sample.args), sample.kwargs, "minidl")
            try:
                arranged(function)(*call.args, **call.kwargs)
            except (*REFUSALS, RuntimeError) as error:
                yield label, "" if clear(error, label) or "converted to Scalar" in str(error) else message(error)
            else:
                yield label, "accepted"


def run(wanted: Sequence[str] = (), dtype: torch.dtype = torch.float32) -> list[Row]:
    """The rows of all names, or of those wanted; what several OpInfos of one name give is one row.

    Of another dtype, those of OpInfos alone.
    """
    operations, modules = databases()
    found: dict[str, Row] = {}
    runs = [(operations, functools.partial(run_operation, dtype=dtype)), (modules, run_module)]
    for database, each_of in runs[: 2 if dtype == torch.float32 else 1]:
        for info in database:
            if not wanted or info.name.rpartition(".")[2] in wanted:
                for row in each_of(info):
                    found.setdefault(row.label, Row(row.label)).add(row)
    return sorted((row for row in found.values() if row.total), key=lambda row: row.label.lower())


def cell(row: Row) -> str:
    """What is refused and what differs, the most frequent first, and why."""
    told = [f"refused ({count}): `{how}`" for how, count in row.refuses.most_common()]
    told += [f"differs ({count}): `{how}`: {reason(row.label, how)}" for how, count in row.differs.most_common()]
    return "<br>".join(told).replace("|", "\\|")


def line(row: Row, note: str = "") -> str:
    refused, differs = row.refuses.total() or "", row.differs.total() or ""
    return f"| `{row.label}`{note} | {row.passes} | {refused} | {differs} | {cell(row)} |"


def written(rows: Sequence[Row], narrow: Sequence[Row], refusals: Sequence[tuple[str, str]]) -> str:
    """The page."""
    passes, refused, differs = (
        sum(counts) for counts in zip(*((r.passes, r.refuses.total(), r.differs.total()) for r in rows), strict=True)
    )
    total = passes + refused + differs
    lines = [*map(line, rows), *(line(row, ", float16") for row in narrow if row.passes < row.total)]
    told = sorted({(label, how) for label, how in refusals if how})
    labels = {row.label for row in rows}
    public = [f"ops.{name}" for name in sorted(ops.__all__)]
    public += [f"nn.{name}" for name in sorted(nn.__all__, key=str.lower) if inspect.isclass(getattr(nn, name))]
    others = [name for name in public if name not in labels]
    rest = [f"| `{name}` | {OWN.get(name) or WITHOUT_DATA.get(name) or 'no samples in PyTorch'} |" for name in others]
    return (
        HEAD.format(torch=torch.__version__.partition("+")[0], total=total, passes=passes, refused=refused,
                    differs=differs, share=100 * passes / total, samples=SAMPLES, elements=f"{ELEMENTS:,}",
                    narrow=NARROW, narrow_total=sum(row.total for row in narrow),
                    narrow_passes=sum(row.passes for row in narrow))
        + "\n".join(lines)
        + WRONG.format(calls=len(refusals), same=sum(not how for _, how in refusals))
        + "\n".join(f"| `{label}` | {how}: {reason(label, how)} |" for label, how in told)
        + MIDDLE + "\n".join(rest) + "\n"
    )  # fmt: skip


def made_with(page: str) -> str:
    """The version of torch whose samples made a page."""
    match = re.search(r"[Tt]orch (\S+)'s", page)
    return match[1] if match else ""


if __name__ == "__main__":
    chosen = sys.argv[1:]
    table, half = run(chosen), run(chosen, torch.float16)
    if chosen:
        for row in (*table, *half):
            print(f"{row.label}: {row.passes} pass, {row.refuses.total()} refused, {row.differs.total()} differ")
            print("\n".join(f"    {how}" for how in (*row.refuses, *row.differs)))
    else:
        PAGE.write_text(written(table, half, [found for op in databases()[0] for found in wrong(op)]))
        print(f"wrote {PAGE}")
