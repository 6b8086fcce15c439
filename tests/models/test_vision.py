"""The published networks: torchvision's names and shapes, loading both ways, no copy of an image after the first layer.

torchvision/*.txt are the names and shapes of its state_dicts (0.26).
"""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minidl import models, ops
from minidl.autograd import no_grad
from minidl.optim import SGD
from minidl.tensors import Tensor, default_device

RECORDED = sorted(Path(__file__).with_name("torchvision").glob("*.txt"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_names_and_shapes_are_torchvisions(path):
    model = getattr(models, path.stem)(device="meta")
    found = [f"{name} {'x'.join(map(str, t.shape)) or '-'}" for name, t in model.state_dict().items()]
    assert found == path.read_text().splitlines()


def test_a_pictures_size_and_channels_are_free():
    model = models.resnet18(3, channels=1, small=True).eval()
    with no_grad():
        assert list(model(Tensor(torch.randn(2, 1, 17, 20, device=default_device()))).shape) == [2, 3]


def test_a_unet_says_which_sizes_it_takes():
    model = models.unet(2, width=4, depth=2)
    with pytest.raises(ValueError, match=r"x has shape \[1, 3, 6, 8\], expected a height and width that are multiples"):
        model(Tensor(torch.randn(1, 3, 6, 8, device=default_device())))


class Copies(TorchDispatchMode):
    """Counts copies of images that torch makes outside of the interpreter's own memory."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::clone", "aten::_to_copy") and args[0].dim() == 4:
            self.sizes.append(tuple(args[0].shape))
        return out


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
def test_a_step_copies_the_picture_alone(name):
    """NCHW goes in once; all that follows lies in rows of channels, gradients too."""
    model = getattr(models, name)(5)
    x = Tensor(torch.randn(2, 3, 32, 32, device=default_device()))
    target = Tensor(torch.tensor([1, 4], device=default_device()))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        ops.cross_entropy(model(x), target).backward()
        optimizer.step()

    step()
    with Copies() as copies:
        step()
    assert copies.sizes == [(2, 32, 32, 3)]
