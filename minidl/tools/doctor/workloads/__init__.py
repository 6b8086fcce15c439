"""The calls of the offline compile: the examples of every spec, and launchers that no spec reaches.

Nothing is computed, so inputs are empty memory. Read products, convolution, then other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from minidl.kernels import conv, float8
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing.compare import as_tuple, wrap
from minidl.testing.specs import Case, Make, OpSpec, all_specs
from minidl.testing.specs.base import FLOATS
from minidl.testing.specs.make import SeededMake
from minidl.tools.doctor.workloads import convolution, other, products
from minidl.tools.doctor.workloads.convolution import Calls

# Families that only transposed convolutions and input gradients use.
TRANSPOSED = ("conv_back", "conv_few")
NORM = "norm", "norm_alone", "norm_grad", "norm_stats", "norm_sums"
# Families whose every tile is compiled for matrix products.
PRODUCTS = (
    "gemm", "gemm_parts", "gemm_cut", "gemm_pointer", "gemm_rows", "gemm_thin", "gemm_vector", "gemm_sum",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Calls whose launches are compiled.

    families  tile families whose every tile is forced in turn
    calls     for a dtype, the calls by name
    """

    name: str
    families: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    calls: Callable[[torch.dtype], Calls]


def workloads(name: str = "") -> list[Workload]:
    """Return the workloads with `name` in their name."""
    forms = tuple(family for family in conv.FAMILIES if family not in TRANSPOSED + PRODUCTS)
    of_specs = [
        Workload(spec.name, spec.families, spec.dtypes, partial(_examples, spec)) for spec in all_specs().values()
    ]
    of_launchers = [
        Workload("gemm", PRODUCTS, FLOATS, products.gemms),
        Workload("convolution", forms, FLOATS, convolution.convolutions),
        Workload("convolution as a product", (), FLOATS, convolution.products),
        Workload("convolution and a sum", ("conv_box", "conv_batch"), FLOATS, convolution.sums),
        Workload("convolution of halves", ("conv_box", "conv_box_grad_weight"), FLOATS, convolution.concat_pairs),
        Workload("convolution of volumes", ("conv_box", "conv_box_grad_weight"), FLOATS, convolution.volumes),
        Workload("transposed convolution", TRANSPOSED, FLOATS, convolution.transposed_convolutions),
        Workload("float8", ("float8",), float8.SOURCES, products.float8_conversions),
        Workload("products of float8", ("conv_box", "conv_batch", "gemm"), float8.DTYPES, products.float8_products),
        Workload("optimizers", ("update", "update_measure", "update_prepare"), FLOATS, other.optimizers),
        Workload("moving averages", ("elementwise",), FLOATS, other.averages),
        Workload("sums over shards", ("elementwise",), FLOATS, other.trees),
        Workload("statistics over shards", ("norm_join", "norm_grad"), FLOATS, other.shard_statistics),
        Workload("rows apart", ("bias_act_grad", *NORM), FLOATS, other.padded_rows),
        Workload("scaled sums", ("bias_act", "bias_act_grad"), FLOATS, other.scaled_sums),
        Workload("batch norm of planes", ("norm_planes",), FLOATS, other.planes),
        Workload("fused", ("norm", "norm_sums", "norm_handed", "elementwise", "dropout"), FLOATS, other.fused),
        Workload("pictures", ("images",), FLOATS, other.pictures),
        Workload("recurrences", ("recurrent", "recurrent_grad"), FLOATS, other.recurrences),
        Workload("random numbers", ("random",), FLOATS, other.random_numbers),
    ]
    return [load for load in (*of_specs, *of_launchers) if name in load.name]


def precisions(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the precisions of products of a dtype."""
    return launch.PRECISIONS if dtype == torch.float32 else ("ieee",)


def _examples(spec: OpSpec, dtype: torch.dtype) -> Calls:
    def forward_and_backward(example: Callable[[Make], Case]) -> None:
        case = example(SeededMake(0, dtype))
        args = [wrap(value, position in spec.differentiable) for position, value in enumerate(case.args)]
        outputs = spec.op(*args, **{name: wrap(value) for name, value in case.kwargs.items()})
        for output in as_tuple(outputs):
            if output.requires_grad:
                output.backward(Tensor(torch.zeros_like(output.data)), retain_graph=True)

    for name, example in spec.examples.items():
        yield name, partial(forward_and_backward, example)
