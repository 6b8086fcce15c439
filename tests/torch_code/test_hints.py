"""The hint for a name that torch has and minidl lacks computes the same, or says that minidl does not provide it."""

import inspect
import math
import re

import numpy as np
import pytest
import torch

import minidl
from minidl import nn, ops, optim
from minidl.common import suggestions

HOMES = {
    "minidl": (torch, minidl), "minidl.nn": (torch.nn, nn),
    "minidl.nn.functional": (torch.nn.functional, nn.functional), "minidl.nn.init": (torch.nn.init, nn.init),
    "minidl.nn.utils": (torch.nn.utils, nn.utils),
    "minidl.optim": (torch.optim, optim), "minidl.Tensor": (torch.Tensor, minidl.Tensor),
}  # fmt: skip
A, B = torch.tensor([[0.3, -1.5, 0.9], [2.0, 0.1, -0.4]]), torch.tensor([[1.2, 0.7, -0.6], [0.5, -2.0, 1.0]])
POSITIVE, HOLES = A.abs() / 4, torch.tensor([[math.nan, 1.0, 2.0], [math.inf, 4.0, -1.0]])
SIGNS, PICTURE = torch.tensor([[1.0, -1.0, 1.0], [-1.0, 1.0, 1.0]]), torch.arange(24.0).reshape(1, 4, 2, 3)
# Arguments of torch's function by the names that the expression has, where x alone or x and y are not all.
ARGUMENTS = {
    "broadcastto": {"x": A, "size": (4, 2, 3)},
    "channelshuffle": {"x": PICTURE, "groups": 2}, "clampmax": {"x": A, "max": 0.2}, "clampmin": {"x": A, "min": 0.2},
    "dist": {"x": A, "y": B, "p": 2},
    "ger": {"x": A[0], "vec2": B[1]}, "fmax": {"x": HOLES, "y": B}, "fmin": {"x": HOLES, "y": B},
    "nanmean": {"x": HOLES[:, 1:]},
    "moveaxis": {"x": PICTURE, "source": 1, "destination": 3}, "nansum": {"x": HOLES},
    "isneginf": {"x": -HOLES}, "isposinf": {"x": HOLES}, "parameterstovector": {"parameters": [A, B]},
    "rsqrt": {"x": POSITIVE},
    "scaleddotproductattention": {"query": A[None], "key": B[None], "value": A[None]},
    "swapdims": {"x": A, "dim0": 0, "dim1": 1}, "take": {"x": A, "index": torch.tensor([0, 4])},
    "takealongdim": {"x": A, "indices": torch.tensor([[1], [2]]), "dim": 1},
    "threshold": {"x": A, "threshold": 0.2, "value": 5.0},
    "diff": {"x": A}, "numel": {"x": A},
}  # fmt: skip


def public(home):
    return [name for name in dir(home) if not name.startswith("_")]


def lacking():
    """Names of torch that minidl has not, each with what is said of it."""
    for home, (theirs, ours) in HOMES.items():
        for name in public(theirs):
            if name in dir(ours) or inspect.ismodule(getattr(theirs, name)):
                continue
            try:
                getattr(minidl.ones(2, 2) if home == "minidl.Tensor" else ours, name)
            except AttributeError as error:
                yield home, name, str(error)


def test_no_hint_names_another_function():
    said = list(lacking())
    assert len(said) > 1000
    known = {*suggestions.EXPRESSIONS.values(), *suggestions.INSTEAD.values()}
    for home, name, text in said:
        if (near := re.search(r"(?:did you mean |it is minidl\.ops\.|write minidl\.ops\.)(\w+)", text)) is not None:
            assert near[1].rstrip("_") == name.rstrip("_"), text
        elif (
            written := re.search(r"; write x = (\w+)\(x\)$|; write x = minidl\.ops\.(\w+)\(x\), or", text)
        ) is not None:
            assert f"{written[1] or written[2]}_" == name, text
        elif (written := re.search(r"; write (.*)$", text)) is not None:
            assert written[1] in known, text
        else:
            assert "minidl does not provide it; see dir(" in text, (home, name, text)


@pytest.mark.parametrize("name", suggestions.EXPRESSIONS)
def test_an_expression_computes_the_same(name, device):
    function = next(
        getattr(home, each)
        for home in (torch.nn.functional, torch, torch.nn.utils, torch.Tensor)
        for each in public(home)
        if each.replace("_", "") == name
    )
    code = suggestions.EXPRESSIONS[name]
    given = ARGUMENTS.get(name) or ({"x": A, "y": B} if re.search(r"\by\b", code) else {"x": A})
    names = [each for each in ("x", "y", "z") if each in given]
    positional, rest = [given[each] for each in names], {n: v for n, v in given.items() if n not in names}
    with torch.no_grad():
        expected = function(*positional, **rest) if names else function(*rest.values())

    def ours(value):
        if isinstance(value, list):
            return [ours(each) for each in value]
        return minidl.Tensor(value.to(device)) if isinstance(value, torch.Tensor) else value

    found = eval(
        code, {"ops": ops, "minidl": minidl, "math": math, "torch": torch} | {n: ours(v) for n, v in given.items()}
    )
    np.testing.assert_allclose(
        np.asarray(found.cpu() if isinstance(found, minidl.Tensor) else found),
        np.asarray(expected),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_typing_error_is_told():
    for home, name, meant in (
        (minidl, "zeross", "zeros"), (nn, "Conv2D", "Conv2d"), (nn.functional, "softmx", "softmax"),
        (nn.init, "xavier_unifrom_", "xavier_uniform_"), (nn.utils, "clip_grad_norms_", "clip_grad_norm_"),
        (nn.init, "kaiming_normal", "kaiming_normal_"), (optim, "AdmW", "AdamW"),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=rf"did you mean {meant}\?"):
            getattr(home, name)
