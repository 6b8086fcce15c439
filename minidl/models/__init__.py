"""Complete models, each short enough to read like its description."""

from minidl.models.table_mlp import TableMLP
from minidl.models.text_mlp import TextMLP

__all__ = ["TableMLP", "TextMLP"]
