"""What some packages ask a GPU for before they launch: its name, its size, and that it be current."""

import torch

from minidl.testing.fake_card import ANSWERS

ASKED = (
    "get_device_properties", "get_device_name", "get_device_capability", "current_device", "device_count",
    "synchronize", "device",
)  # fmt: skip


def pretend_gpu():
    """Answer as a card of compute capability 9.0 with 4 multiprocessors; tensors stay on the CPU, and say so."""
    for name in ASKED:
        setattr(torch.cuda, name, ANSWERS[name])
