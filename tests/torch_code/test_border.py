"""What code of torch, and torch's ways of a call, meet at the border: each error says what to write."""

import io
import subprocess
import sys

import pytest
import torch

import minidl
from minidl import nn, optim


def model():
    layer = nn.Linear(3, 2)
    layer(minidl.ones(4, 3)).sum().backward()
    return layer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0), r"use minidl\.nn\.utils\.clip_grad_norm_"),
        (lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1.0), r"or clip_grad_value_, or max_norm="),
        (lambda m: torch.amp.GradScaler("cpu").scale(m.bias.sum()), r"use minidl\.amp\.GradScaler"),
        (lambda m: torch.amp.GradScaler("cpu").scale([m.bias]), r"use minidl\.amp\.GradScaler"),
        (torch.nn.utils.parametrizations.weight_norm, r"use minidl\.nn\.utils\.parametrizations"),
        (lambda m: torch.norm_except_dim(m.weight), r"got a minidl Tensor; use torch's with x\.to_torch\(\)"),
        (lambda m: iter(m.bias.sum()), "a tensor of 0 dimensions cannot be iterated over"),
    ],
)
def test_torchs_functions_name_minidls(call, message):
    with pytest.raises(TypeError, match=message):
        call(model())


def test_a_rule_of_the_users_own_is_no_subclass():
    class Lion(optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    with pytest.raises(TypeError, match=r"Lion: Optimizer is the base .* write a class without a base, whose step\(\)"):
        Lion(model().parameters(), 0.1)


def test_randint_takes_the_size_by_its_name():
    minidl.manual_seed(0)
    assert (minidl.randint(5, size=(40,)).tolist(), minidl.randint(high=5, size=(2,)).shape) == (
        minidl.randint(0, 5, (40,), seed=0).tolist(),
        (2,),
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.Conv1d(2, 2, 3, padding=1), torch.nn.Conv1d(2, 2, 3, padding=1)),
        (nn.Conv2d(2, 2, 3, stride=2), torch.nn.Conv2d(2, 2, 3, stride=2)),
        (nn.Conv2d(2, 2, 3, padding="same"), torch.nn.Conv2d(2, 2, 3, padding="same")),
        (nn.Conv3d(2, 2, 3, dilation=(1, 2, 1)), torch.nn.Conv3d(2, 2, 3, dilation=(1, 2, 1))),
        (nn.ConvTranspose1d(2, 2, 3, stride=2), torch.nn.ConvTranspose1d(2, 2, 3, stride=2)),
        (nn.ConvTranspose2d(2, 2, 3, 2, 1, 1), torch.nn.ConvTranspose2d(2, 2, 3, 2, 1, 1)),
    ],
)
def test_settings_of_convolutions_are_torchs(ours, theirs):
    for name in ("kernel_size", "stride", "padding", "dilation"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_open_files_hold_what_files_hold(tmp_path):
    state = {"a": minidl.ones(2), "b": [1, None, {"c": torch.zeros(2, 2)}]}
    for value in (model().state_dict(), state):
        buffer = io.BytesIO()
        minidl.save(value, buffer)
        minidl.save(value, tmp_path / "file")
        assert buffer.getvalue() == (tmp_path / "file").read_bytes()
        buffer.seek(0)
        assert str(minidl.load(buffer)) == str(minidl.load(tmp_path / "file"))
    with pytest.raises(ValueError, match="not a safetensors file"):
        minidl.load(io.BytesIO(b"other"))
    spoilt = bytearray(buffer.getvalue())
    spoilt[-1] ^= 1
    with pytest.raises(ValueError, match="its content does not match its checksum"):
        minidl.load(io.BytesIO(bytes(spoilt)))


class TestEinops:
    def test_it_is_torchs(self):
        einops = pytest.importorskip("einops")

        def each(x):
            yield einops.rearrange(x, "a b (c d) -> d (a b) c", d=2)
            yield einops.rearrange([x, x], "n a b c -> a n (b c)")
            yield einops.repeat(x, "a b c -> a (b 2) c 3")
            yield einops.einsum(x, x, "a b c, a d c -> a b d")
            for how in ("sum", "mean", "max", "min", "prod"):
                yield einops.reduce(x, "a b c -> b", how)
            packed, shapes = einops.pack([x, x.sum(1)], "a * c")
            yield packed
            yield from einops.unpack(packed, shapes, "a * c")

        values = torch.arange(24.0).reshape(2, 3, 4) / 8
        x, leaf = minidl.tensor(values).requires_grad_(), values.clone().requires_grad_()
        for ours, theirs in zip(each(x), each(leaf), strict=True):
            assert type(ours) is minidl.Tensor
            torch.testing.assert_close(ours.data.cpu(), theirs.detach())
        for start in (x, leaf):
            sum(y.sum() for y in each(start)).backward()
        torch.testing.assert_close(x.grad.data.cpu(), leaf.grad)
        assert einops.reduce(x > 1, "a b c -> a", "any").tolist() == [True, True]
        assert einops.asnumpy(x).shape == (2, 3, 4)

    def test_imported_first_it_works_as_well_and_minidl_imports_neither(self):
        pytest.importorskip("einops")
        code = (
            "import sys, minidl; assert not {'torch', 'einops'} & set(sys.modules); del sys.modules['minidl']\n"
            "sys.meta_path[:] = [f for f in sys.meta_path if 'minidl' not in type(f).__module__]\n"
            "import einops, minidl; print(einops.rearrange(minidl.ones(2, 3), 'a b -> b a').shape)"
        )
        found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        assert found.stdout == "torch.Size([3, 2])\n"


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
@pytest.mark.parametrize("hook", ["weight_norm", "spectral_norm"])
def test_functions_of_torch_that_hook_into_modules_are_refused(hook):
    with pytest.raises(AttributeError, match="hooks into modules got minidl's Linear"):
        getattr(torch.nn.utils, hook)(nn.Linear(3, 3))
