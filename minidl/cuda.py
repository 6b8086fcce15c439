"""torch.cuda's functions for devices, memory and synchronization; `manual_seed` is minidl's."""

from torch.cuda import current_device as current_device
from torch.cuda import device_count as device_count
from torch.cuda import empty_cache as empty_cache
from torch.cuda import get_device_name as get_device_name
from torch.cuda import is_available as is_available
from torch.cuda import max_memory_allocated as max_memory_allocated
from torch.cuda import memory_allocated as memory_allocated
from torch.cuda import set_device as set_device
from torch.cuda import synchronize as synchronize

from minidl.common import suggestions
from minidl.random import manual_seed as manual_seed

manual_seed_all = manual_seed


def __getattr__(name: str) -> object:
    raise suggestions.attribute("minidl.cuda", name, globals())
