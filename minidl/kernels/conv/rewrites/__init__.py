"""Rewrites: convolutions computed by other convolutions, whose operands are copies or views.

Read rewrite (the interface), columns and pairs (views of images), fill and unshuffle (copies), taps (a kernel of its
own), and parts (phases, and a pool or a sum afterwards).
"""

from minidl.kernels.conv.rewrites.columns import Columns
from minidl.kernels.conv.rewrites.fill import Fill
from minidl.kernels.conv.rewrites.pairs import Pairs
from minidl.kernels.conv.rewrites.parts import Phases, Pool, Sum
from minidl.kernels.conv.rewrites.rewrite import Conversion as Conversion
from minidl.kernels.conv.rewrites.rewrite import Rewrite as Rewrite
from minidl.kernels.conv.rewrites.taps import Taps
from minidl.kernels.conv.rewrites.unshuffle import Unshuffle

REWRITES: tuple[Rewrite, ...] = Phases(), Pool(), Sum(), Fill(), Taps(), Columns(), Pairs(), Unshuffle()
