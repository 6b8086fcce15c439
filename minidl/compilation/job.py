"""One kernel to compile, as plain data that can be sent to another process. Imports neither torch nor Triton."""

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

    kernel      module and name, "minidl.kernels.gemm:gemm_sum_kernel"; or a name in `launch_jobs.registered`
    signature   type of every parameter, in order; "constexpr" for constants
    constants   (path of the parameter, value); a type of `triton.language` is {"dtype": name}, a constexpr of it
                {"constexpr": value}, a registered function {"function": name}, an argument record {"record": class,
                "fields": values by name}, as in `signature`
    attributes  (path of the parameter, properties of its value)
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
        """A hash, equal for equal machine code."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for `Job(**fields)` in another process."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def name(self) -> str:
        return self.kernel.partition(":")[2]

    @functools.cached_property
    def constant(self) -> dict[str, Any]:
        """The declared constants by name, and the fields of declared records."""
        names = list(self.signature)
        values = {names[path[0]]: value for path, value in self.constants if len(path) == 1}
        fields: dict[str, Any] = {}
        for name in self.declared:
            if name in values:
                fields |= _fields(name, values[name])
        return fields

    @property
    def tile(self) -> str:
        """Block sizes (all constants of a registered kernel), warps and stages."""
        constants = {n: value for n, value in self.constant.items() if n.startswith("BLOCK") or ".py:" in self.kernel}
        sizes = [f"{n.removeprefix('BLOCK_')}={_bare(value)}" for n, value in constants.items()]
        return " ".join([*sizes, f"warps={self.options['num_warps']}", f"stages={self.options['num_stages']}"])

    @functools.cached_property
    def dtype(self) -> str:
        """The dtype of the first floating-point tensor among the arguments, "-" without one."""
        match = re.search(rf"(?:\*k?|tensordesc<)({'|'.join(_DTYPES)})", str(list(self.signature.values())))
        return _DTYPES[match[1]] if match else "-"

    @property
    def precision(self) -> str:
        """How float32 matrix products are computed, "-" without any."""
        return self.constant.get("PRECISION", "-") if self.dtype == "float32" else "-"

    def __str__(self) -> str:
        return f"{self.name} [{self.tile}] {self.dtype} {self.precision} {arch_name(self.arch)}"


def _fields(name: str, value: Any) -> dict[str, Any]:
    """Return a constant by name, or the fields of a record, nested ones included."""
    if isinstance(value, dict) and "record" in value:
        return {key: item for pair in value["fields"].items() for key, item in _fields(*pair).items()}
    return {name: value["constexpr"] if isinstance(value, dict) and "constexpr" in value else value}


def _bare(value: Any) -> Any:
    """Return a constant without the kind that its JSON has."""
    return next(iter(value.values())) if isinstance(value, dict) else value
