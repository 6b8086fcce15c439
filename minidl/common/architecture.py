"""GPU architectures: their names, and the tile table that each can use."""

from __future__ import annotations

Arch = int | str  # an NVIDIA compute capability without the point, such as 90, or an AMD name, such as "gfx942"


def target_of(arch: Arch) -> str:
    """Return the target of the newest tile table that an architecture of at least 80 can use."""
    return "sm_90" if isinstance(arch, int) and arch // 10 == 9 else "sm_80"


def arch_name(arch: Arch) -> str:
    """Return the name of an architecture, such as "sm_90" or "gfx942"."""
    return arch if isinstance(arch, str) else f"sm_{arch}"
