"""Complete models, each short enough to read like its description."""

from minidl.models.cnn import ECE408, SmallCNN
from minidl.models.dcgan import Discriminator, Generator, load_generator
from minidl.models.table_mlp import TableMLP
from minidl.models.text_mlp import TextMLP

__all__ = ["ECE408", "Discriminator", "Generator", "SmallCNN", "TableMLP", "TextMLP", "load_generator"]
