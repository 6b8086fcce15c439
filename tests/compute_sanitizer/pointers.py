"""A pytest plugin: convolutions store through pointers what they would store in boxes, as initcheck wants it."""

from minidl.kernels.conv import boxed, held

boxed.stores_boxes = held.fills_tiles = lambda problem: False
