"""GPU architectures: their names, and the tile table that each can use."""

from __future__ import annotations

Arch = int | str  # a compute capability of NVIDIA's without the point, as 90; or a name of AMD's, as "gfx942"


def target_of(arch: Arch) -> str:
    """The newest of the tile tables that an architecture of at least 80 can run, as 90 for sm_90."""
    return "sm_90" if isinstance(arch, int) and arch // 10 == 9 else "sm_80"


def arch_name(arch: Arch) -> str:
    """As "sm_90" and "gfx942"."""
    return arch if isinstance(arch, str) else f"sm_{arch}"
