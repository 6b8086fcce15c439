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
from minidl.training.loop.adversaries import Adversaries

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


def copied(step):
    """The shapes that a second step copies."""
    step()
    with Copies() as copies:
        step()
    return copies.sizes


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "unet"])
def test_a_step_copies_the_picture_alone(name):
    """NCHW goes in once; all that follows lies in rows of channels, gradients too, and those of joined tensors."""
    options = {"width": 8, "depth": 2} if name == "unet" else {}
    model = getattr(models, name)(5, **options)
    x = Tensor(torch.randn(2, 3, 32, 32, device=default_device()))
    target = Tensor(torch.randint(0, 5, (2, 32, 32) if name == "unet" else (2,), device=default_device()))
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.9)

    def step():
        optimizer.zero_grad()
        ops.cross_entropy(model(x), target).backward()
        optimizer.step()

    assert copied(step) == [(2, 32, 32, 3)]


def test_a_step_of_a_gan_copies_the_pictures_alone():
    settings = {"latent": 8, "channels": 3, "size": (16, 16), "width": 4, "layers": 2, "kernel": 5}
    networks = Adversaries(settings, 3, 1e-3, 0, captured=False)
    x = Tensor(torch.randn(3, 3, 16, 16, device=default_device()))
    assert copied(lambda: networks.step(x)) == [(3, 16, 16, 3)]
