"""What Triton is asked to compile, as plain data that another process can be given; without torch and Triton."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from minidl.common.architecture import Arch, arch_name

WARP = 32
_DTYPES = {
    "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A kernel with everything that determines its machine code.

    kernel      module and name, "minidl.kernels.gemm:gemm_sum_kernel"; a name of `ahead.known`
    signature   type of every parameter, in order; "constexpr" for constants
    constants   (path of the parameter, value); a type of `triton.language` is {"dtype": name}, a constexpr of it
                {"constexpr": value}, a function of `ahead.known` {"function": name}
    attributes  (path of the parameter, known properties of its value)
    options     num_warps, num_stages and the like
    declared    names of the parameters that the source declares constant (others are constant by a value of 1 or None)
    """

    kernel: str
    arch: Arch
    signature: dict[str, Any]
    constants: list[tuple[list[int], Any]]
    attributes: list[tuple[list[int], Any]]
    options: dict[str, Any]
    declared: list[str]

    @functools.cached_property
    def key(self) -> str:
        """Equal for equal machine code."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """The fields, for `Job(**fields)` elsewhere."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @functools.cached_property
    def constant(self) -> dict[str, Any]:
        """The declared constants by name."""
        names = list(self.signature)
        found = {
            names[path[0]]: value["constexpr"] if isinstance(value, dict) and "constexpr" in value else value
            for path, value in self.constants
            if len(path) == 1
        }
        return {name: found[name] for name in self.declared if name in found}

    @property
    def tile(self) -> str:
        """Block sizes (of a kernel in `ahead.known` all constants), warps and stages."""
        told = {n: value for n, value in self.constant.items() if n.startswith("BLOCK") or ".py:" in self.kernel}
        sizes = [f"{n.removeprefix('BLOCK_')}={_plainly(value)}" for n, value in told.items()]
        return " ".join([*sizes, f"warps={self.options['num_warps']}", f"stages={self.options['num_stages']}"])

    @functools.cached_property
    def dtype(self) -> str:
        """Of the first floating tensor among the arguments, "-" where there is none."""
        found = re.search(rf"(?:\*k?|tensordesc<)({'|'.join(_DTYPES)})", str(list(self.signature.values())))
        return _DTYPES[found[1]] if found else "-"

    @property
    def precision(self) -> str:
        """How float32 matrix products are computed, "-" where there are none."""
        return self.constant.get("PRECISION", "-") if self.dtype == "float32" else "-"

    def __str__(self) -> str:
        return f"{self.name} [{self.tile}] {self.dtype} {self.precision} {arch_name(self.arch)}"


def _plainly(value: Any) -> Any:
    """A constant without what its JSON says of its kind."""
    return next(iter(value.values())) if isinstance(value, dict) else value
