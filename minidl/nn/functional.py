"""The functions of `minidl.ops`, by the name that torch's code imports: `import minidl.nn.functional as F`."""

from minidl import ops
from minidl.common.suggestions import attribute
from minidl.ops import *
from minidl.ops import __all__ as __all__


def __getattr__(name: str) -> object:
    raise attribute("minidl.nn.functional", name, ops.__all__)
