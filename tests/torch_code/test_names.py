"""docs/torch_names.md tells what becomes of torch's own test data; argument names are torch's."""

import inspect
import re

import pytest
import torch

import minidl
from minidl import nn, ops, optim
from minidl.runtime import launch
from minidl.tensors import Tensor
from tests.torch_code import names, signatures
from tests.torch_code.reasons import BY_VERSION, OWN, SIGNATURES, WITHOUT_DATA, reason

VERSION = torch.__version__.partition("+")[0]


@pytest.fixture(scope="module")
def rows(pytestconfig):
    if not launch.INTERPRETED or pytestconfig.getoption("--sanitize"):
        pytest.skip("numbers of kernels are held by their records; this is of names, which are the same everywhere")
    return names.run()


@pytest.fixture(scope="module")
def narrow(rows):
    return names.run(dtype=torch.float16)


@pytest.fixture(scope="module")
def refusals(rows):
    return [found for op in names.databases()[0] for found in names.wrong(op)]


@pytest.mark.slow
def test_nothing_differs_without_a_reason(rows, narrow):
    assert sum(row.passes for row in rows) > 2000
    assert sum(row.passes for row in narrow) > 500
    differ = {(row.label, how) for row in (*rows, *narrow) for how in row.differs}
    assert not {each for each in differ if reason(*each) is None}


@pytest.mark.slow
def test_what_torch_refuses_is_refused_or_has_a_reason(refusals):
    assert len(refusals) > 200
    assert not {each for each in refusals if each[1] and reason(*each) is None}


@pytest.mark.slow
def test_the_table_is_up_to_date(rows, narrow, refusals):
    page = names.PAGE.read_text()
    if names.made_with(page) != VERSION:
        pytest.skip(f"the table was made with torch {names.made_with(page)}, whose samples are others")
    assert names.written(rows, narrow, refusals) == page, "write it anew with `python -m tests.torch_code.names`"


def test_every_operation_and_layer_is_in_the_table():
    page = names.PAGE.read_text()
    public = {f"ops.{name}" for name in ops.__all__} | {
        f"nn.{name}" for name in nn.__all__ if inspect.isclass(getattr(nn, name))
    }
    missing = {label for label in public if f"`{label}`" not in page}
    assert not missing
    assert {*WITHOUT_DATA, *OWN} <= public


def functions():
    """(label, function, torch's signatures) of the names that torch has, too."""
    for name in sorted({*ops.__all__, *minidl.__all__}):
        function = getattr(ops, name, None) or getattr(minidl, name)
        if callable(function) and not inspect.isclass(function):
            yield f"{'ops' if hasattr(ops, name) else 'minidl'}.{name}", function, signatures.of_function(name)
    for name in sorted(dir(Tensor)):
        method = inspect.getattr_static(Tensor, name)
        if not name.startswith("_") and callable(method):
            known = signatures.of_method(name)  # not all of it is so in torch: x.mul(value=y) is not taken
            as_functions = [names[1:] for names in signatures.of_function(name.rstrip("_"))]
            yield f"Tensor.{name}", method, known and known + as_functions
    unwritten = torch.nn.Module.forward
    for kind, ours, theirs in (("nn", nn, torch.nn), ("optim", optim, torch.optim)):
        for name in ours.__all__:
            own, other = getattr(ours, name), getattr(theirs, name, None)
            for method in ("__init__", "forward", "step") if inspect.isclass(own) and other else ():
                if hasattr(own, method) and getattr(other, method, unwritten) is not unwritten:
                    known = [signatures.positional(getattr(other, method))]
                    yield f"{kind}.{name}.{method}", getattr(own, method), known


def test_arguments_have_torchs_names_in_torchs_order():
    """Each position of torch's has torch's name, or what differs is written down."""
    checked = {}
    for label, function, theirs in functions():
        if theirs:
            checked[label] = signatures.agree(function, theirs, method=label.startswith("Tensor."))
    assert sum(checked.values()) > 250
    others = {label for label, same in checked.items() if not same}
    assert others <= {*SIGNATURES, *BY_VERSION}
    if names.made_with(names.PAGE.read_text()) == VERSION:  # others document other names
        assert set(SIGNATURES) == others, "an exception that is none any more"


@pytest.mark.parametrize("call", [
    lambda x: ops.mse_loss(input=x, target=x),
    lambda x: ops.add(input=x, other=x),
    lambda x: ops.linear(input=x, weight=x),
    lambda x: ops.cat(tensors=[x, x], dim=1),
    lambda x: ops.softmax(input=x, dim=0, dtype=torch.float64),
    lambda x: ops.sum(input=x, dim=0, dtype=torch.float64),
    lambda x: ops.squeeze(input=x, dim=(0, 1)),
    lambda x: ops.to(x, torch.float64, non_blocking=True),
    lambda x: nn.Linear(3, 2)(input=x),
    lambda x: ops.reshape(input=x, shape=(9,)),
    lambda x: ops.permute(x, dims=(1, 0)),
])  # fmt: skip
def test_arguments_are_taken_by_torchs_names(call):
    assert isinstance(call(minidl.ones(3, 3)), Tensor)


@pytest.mark.skipif(not launch.INTERPRETED, reason="samples are torch's, on the CPU")
class TestTheHarness:
    """What it must find: other values, other gradients, other dtypes, errors that tell nothing."""

    X = torch.linspace(-2, 2, 5, requires_grad=True)

    def outcome(self, ours):
        row = names.compare(lambda c: ours(*c.args), lambda c: torch.exp(*c.args), (self.X,), {}, "ops.exp")
        return row.passes, sum(row.refuses.values()), [*row.differs]

    def test_passes_what_is_right(self):
        assert self.outcome(ops.exp) == (1, 0, [])

    def test_finds_other_values(self):
        passes, refused, (how,) = self.outcome(lambda x: ops.exp(x) * (1 + 2e-6))
        assert (passes, refused) == (0, 0)
        assert re.fullmatch(r"\S+ for \S+", how)

    def test_finds_other_gradients(self):
        assert self.outcome(lambda x: ops.exp(x) + (x - x.detach()) * 1e-5)[2][0].startswith("gradient 0: ")
        assert self.outcome(lambda x: ops.exp(x.detach()))[2] == ["has no gradient"]

    def test_finds_other_dtypes_and_shapes(self):
        assert self.outcome(lambda x: ops.exp(x).to(torch.float64))[2] == ["float64 [5], torch's float32 [5]"]
        assert self.outcome(lambda x: ops.exp(x).unsqueeze(0))[2] == ["float32 [1, 5], torch's float32 [5]"]

    def test_a_refusal_names_what_refuses(self):
        def fails(error):
            def function(x):
                raise error

            return function

        assert self.outcome(fails(ValueError("exp: x has shape [5]")))[1] == 1
        assert self.outcome(fails(ValueError("no such thing")))[2] == ["no such thing"]
        assert self.outcome(fails(RuntimeError("exp: x has shape [5]")))[2] == ["RuntimeError: exp: x has shape [..]"]
