"""What some packages ask a GPU for before they launch: its name, its size, and that it be current."""

import contextlib
from types import SimpleNamespace

import torch


def pretend_gpu():
    """Answer as a card of compute capability 9.0 with 4 multiprocessors; tensors stay on the CPU."""
    card = SimpleNamespace(
        name="none", gcnArchName="", multi_processor_count=4, major=9, minor=0, total_memory=1 << 34, warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_block=49152, max_threads_per_multi_processor=2048,
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *_: card
    torch.cuda.get_device_name = lambda *_: card.name
    torch.cuda.get_device_capability = lambda *_: (card.major, card.minor)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.device = lambda *_: contextlib.nullcontext()
