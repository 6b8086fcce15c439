"""Complete models, each short enough to read like its description.

Read `cnn` first, then `text_mlp`, `dcgan` and `resnet`.
"""

from minidl.models.cnn import ECE408, SmallCNN
from minidl.models.dcgan import Discriminator, Generator, load_generator
from minidl.models.densenet import DenseNet, densenet121
from minidl.models.mobilenet import MobileNetV2, mobilenet_v2
from minidl.models.resnet import ResNet, resnet18, resnet34, resnet50
from minidl.models.table_mlp import TableMLP
from minidl.models.text_attention import TextAttention
from minidl.models.text_mlp import TextMLP
from minidl.models.u_net import UNet, unet
from minidl.models.vgg import VGG, vgg16_bn

__all__ = [
    "ECE408",
    "VGG",
    "DenseNet",
    "Discriminator",
    "Generator",
    "MobileNetV2",
    "ResNet",
    "SmallCNN",
    "TableMLP",
    "TextAttention",
    "TextMLP",
    "UNet",
    "densenet121",
    "load_generator",
    "mobilenet_v2",
    "resnet18",
    "resnet34",
    "resnet50",
    "unet",
    "vgg16_bn",
]
