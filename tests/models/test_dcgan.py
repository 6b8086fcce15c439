"""The DCGAN: sizes, shapes, first values, pytorch/examples' weights, and files of generators."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minidl import models, no_grad, random
from minidl.models import dcgan
from minidl.tensors import Tensor, default_device


def noise(*shape):
    return Tensor(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(default_device()))


def test_the_papers_shapes():
    generator = models.Generator(100, 3, (64, 64))
    shapes = [list(parameter.shape) for parameter in generator.parameters() if parameter.ndim > 1]
    assert shapes == [[8192, 100], [512, 256, 5, 5], [256, 128, 5, 5], [128, 64, 5, 5], [64, 3, 5, 5]]
    assert generator.settings == {
        "latent": 100, "channels": 3, "size": [64, 64], "width": 64, "layers": 4, "kernel": 5,
    }  # fmt: skip
    assert generator.upward[6].act == "tanh"


def test_mnists_generator_is_below_4_megabytes():
    generator = models.Generator()
    assert 4 * sum(tensor.numel() for tensor in generator.state_dict().values()) < 4e6
    assert 0.8e6 < generator.num_parameters() < 0.85e6


@pytest.mark.parametrize(
    ("size", "channels", "kernel"), [((28, 28), 1, 5), ((32, 16), 3, 3), ((8, 8), 1, 4), ((64, 64), 1, 5)]
)
def test_pictures_have_their_size_and_range(size, channels, kernel):
    random.manual_seed(0)
    generator = models.Generator(7, channels, size, 4, kernel=kernel)
    discriminator = models.Discriminator(channels, size, 4, kernel=kernel)
    with no_grad():
        pictures = generator(noise(3, 7))
        assert pictures.shape == (3, channels, *size)
        assert pictures.data.abs().max() <= 1
        assert discriminator(pictures).shape == (3,)
        generator.eval()
        assert torch.equal(generator(noise(3, 7)).data, generator(noise(3, 7, 1, 1)).data)


def test_first_values_are_the_papers():
    random.manual_seed(0)
    generator, discriminator = models.Generator(width=16), models.Discriminator(width=16)
    for parameter in (generator.project.weight, generator.upward[0].weight, discriminator.downward[1].weight):
        assert abs(parameter.data.mean().item()) < 0.002
        assert parameter.data.std().item() == pytest.approx(0.02, rel=0.1)
    assert generator.norm.weight.data.mean().item() == pytest.approx(1.0, abs=0.03)
    assert not generator.upward[2].bias.data.any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": (30, 28)}, "pictures of 30 x 28 cannot be halved 2 times; expected multiples of 4"),
        ({"size": (64, 72)}, "cannot be halved 4 times; expected multiples of 16"),
        ({"width": 0}, "width is 0, expected 1 or more"),
        ({"layers": 0}, "layers is 0, expected 1 or more"),
        ({"kernel": 1}, "kernel is 1, expected 2 or more"),
    ],
)
@pytest.mark.parametrize("model", [models.Generator, models.Discriminator])
def test_bad_sizes(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)


def pytorch_examples_generator(nz, ngf, nc):
    """Layer by layer that of https://github.com/pytorch/examples/blob/main/dcgan/main.py."""
    layers = [torch.nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False)]
    for wide in (8, 4, 2):
        layers += [torch.nn.BatchNorm2d(ngf * wide), torch.nn.ReLU(True)]
        layers.append(torch.nn.ConvTranspose2d(ngf * wide, ngf * wide // 2, 4, 2, 1, bias=False))
    layers += [torch.nn.BatchNorm2d(ngf), torch.nn.ReLU(True)]
    layers += [torch.nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), torch.nn.Tanh()]
    network = torch.nn.Module()
    network.main = torch.nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=generator)
                # Activations of about 1, so that tanh hides no difference.
                tensor.copy_(0.06 * drawn if tensor.ndim == 4 else drawn.abs() + 0.5 if "var" in name else drawn)
    return network


@pytest.mark.parametrize("training", [False, True])
def test_the_weights_of_pytorch_examples_give_what_torch_gives(training):
    network = pytorch_examples_generator(nz=10, ngf=8, nc=3)
    model = dcgan.from_pytorch_examples(network.state_dict()).train(training)
    assert model.settings == {
        "latent": 10, "channels": 3, "size": [64, 64], "width": 8, "layers": 4, "kernel": 4,
    }  # fmt: skip
    z = torch.randn(4, 10, 1, 1, generator=torch.Generator().manual_seed(1))
    network.double().train(training)
    with torch.no_grad():
        expected = network.main(z.double())
    with no_grad():
        found = model(Tensor(z.to(default_device()))).data.cpu().double()
    # Five layers of float32 sums of at most 256 terms, four of them normalised: relative errors of some 1e-6 each.
    assert (found - expected).abs().max() < 2e-5
    assert expected.std() > 0.1


def test_another_networks_weights_are_refused():
    state = pytorch_examples_generator(5, 8, 1).state_dict()
    with pytest.raises(ValueError, match=r"no generator of pytorch/examples: expected main\.0\.weight"):
        dcgan.from_pytorch_examples({"fc.weight": torch.zeros(2, 2)})
    missing = {name: tensor for name, tensor in state.items() if name != "main.4.running_var"}
    with pytest.raises(ValueError, match=r'Missing key\(s\) in state_dict: "upward.1.running_var"'):
        dcgan.from_pytorch_examples(missing)
    for name in ("fc.weight", "main.x.weight", "2.weight"):
        with pytest.raises(ValueError, match=f"no generator of pytorch/examples: unknown {name}"):
            dcgan.from_pytorch_examples({**state, name: torch.zeros(2)})


def test_a_file_of_a_generator_comes_back(tmp_path):
    random.manual_seed(1)
    model = models.Generator(5, 1, (8, 12), 4).eval()
    path = tmp_path / "small.safetensors"
    dcgan.save_generator(model, path, command="minidl train gan", seed=7, commit="abc")
    with safe_open(str(path), framework="pt") as opened:
        about = opened.metadata()
    assert about == {
        "format": "minidl generator", "settings": json.dumps(model.settings), "command": "minidl train gan",
        "seed": "7", "commit": "abc", "sha256": about["sha256"],
    }  # fmt: skip
    read = dcgan.load_generator(path)
    assert not read.training
    with no_grad():
        assert torch.equal(read(noise(3, 5)).data, model(noise(3, 5)).data)


def test_what_is_no_generator_is_told(tmp_path):
    with pytest.raises(FileNotFoundError):
        dcgan.load_generator(tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("text")
    with pytest.raises(ValueError, match="not a safetensors file"):
        dcgan.load_generator(tmp_path / "text.safetensors")
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="its format is None, expected 'minidl generator'"):
        dcgan.load_generator(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"kind": "text"}')
    with pytest.raises(ValueError, match=r"config\.json describes no generator: it has no settings of a model"):
        dcgan.load_generator(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 10**6}, r"project\.weight is \[48, 5\], its settings expect \[12000000, 5\]"),
        ({"latent": 10**6}, r"project\.weight is \[48, 5\], its settings expect \[48, 1000000\]"),
        ({"kernel": 10**6}, r"upward\.0\.weight is \[8, 4, 5, 5\], its settings expect \[8, 4, 1000000, 1000000\]"),
        ({"width": 2**20 + 1}, r"width is 1048577, expected a whole number from 1 to 1048576"),
        ({"layers": 2**20}, "describes no generator"),
        ({"layers": 20}, "pictures of 8 x 12 cannot be halved 20 times"),
        ({"size": [8]}, r"size is \[8\], expected height and width"),
        ({"size": [8, 12, 12]}, r"size is \[8, 12, 12\], expected height and width"),
        ({"size": [8, 12.0]}, r"size is 12\.0, expected a whole number"),
        ({"latent": True}, "latent is True, expected a whole number"),
    ],
)
def test_settings_that_the_weights_do_not_fit(tmp_path, change, message):
    """Told before memory is taken for a network far larger than its file."""
    model = models.Generator(5, 1, (8, 12), 4)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    about = {"format": dcgan.FORMAT, "settings": json.dumps({**model.settings, **change})}
    save_file(tensors, str(tmp_path / "a.safetensors"), metadata=about)
    with pytest.raises(ValueError, match=message):
        dcgan.load_generator(tmp_path / "a.safetensors")


def test_a_file_that_is_deep_or_of_whole_numbers_is_no_generator(tmp_path):
    path, model = tmp_path / "a.safetensors", models.Generator(5, 1, (8, 12), 4)
    tensors = {name: tensor.cpu().to(torch.int32).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(path), metadata={"format": dcgan.FORMAT, "settings": json.dumps(model.settings)})
    with pytest.raises(ValueError, match="is of int32, expected floating-point numbers"):
        dcgan.load_generator(path)
    save_file(tensors, str(path), metadata={"format": dcgan.FORMAT, "settings": "[" * 200_000})
    with pytest.raises(ValueError, match=r"a\.safetensors describes no generator: "):
        dcgan.load_generator(path)


@pytest.mark.parametrize("harm", ["value", "setting"])
def test_a_file_of_a_generator_that_was_altered_is_told(tmp_path, harm):
    path = tmp_path / "small.safetensors"
    dcgan.save_generator(models.Generator(5, 1, (8, 12), 4), path, command="minidl train gan", seed=7)
    raw = bytearray(path.read_bytes())
    if harm == "value":
        raw[-2] ^= 1
    else:
        raw = raw.replace(b'"seed":"7"', b'"seed":"6"')
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="does not match its checksum"):
        dcgan.load_generator(path)


def test_a_file_of_a_generator_without_a_checksum_is_read(tmp_path):
    """As older versions wrote it."""
    model = models.Generator(5, 1, (8, 12), 4)
    path = tmp_path / "small.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, str(path), metadata={"format": dcgan.FORMAT, "settings": json.dumps(model.settings)})
    again = dcgan.load_generator(path)
    assert torch.equal(again.project.weight.data, model.project.weight.data)
