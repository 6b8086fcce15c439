"""Cases of xformers' kernels in Triton: norms, rows by index, and products of parts."""

from importlib import import_module

import torch
import torch.nn.functional as F
import triton
from triton.language.extra import libdevice
from xformers.triton import importing

from tests.trials.foreign.case import Cases, pairs
from tests.trials.foreign.shim import pretend_gpu

pretend_gpu()
# Its own way loads libdevice a second time, past the interpreter's functions.
importing.libdevice_find = lambda name: getattr(libdevice, name)
cat, norm, tiled = (
    import_module(f"xformers.ops._triton.{name}")
    for name in ("k_index_select_cat", "rmsnorm_kernels", "tiled_matmul_kernels")
)
cases = Cases()


@cases.add
def norms():
    told = []
    for shape in ((7, 33), (2, 3, 300)):
        x, y, w = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
        told += pairs(
            lambda x, w: norm._rms_norm_forward(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), x, w
        )
        told += pairs(
            lambda x, y, w: norm._rms_norm_add_forward(x.clone(), y, w, 1e-6),
            lambda x, y, w: F.rms_norm(x + y, w.shape, w, 1e-6), x, y, w,
        )  # fmt: skip
    return told


@cases.add
def rows_by_index():
    source, index = torch.randn(20, 37), torch.randperm(20)[:7]
    out = torch.empty(7, 37)
    cat.index_select_cat_fwd_kernel[
        lambda m: (triton.cdiv(7, m["BLOCK_SIZE_INDEX"]), triton.cdiv(37, m["BLOCK_SIZE_COL"]))
    ](out, source, index, 7, 37, source.stride(0), source.stride(1), BLOCK_SIZE_INDEX=4, BLOCK_SIZE_COL=32)
    return [(out, source[index])]


@cases.add
def product_of_parts():
    a, b = torch.randn(70, 64), torch.randn(64, 90)
    c = torch.empty(70, 90)
    tiled._launch_triton_matmul([[a]], [[b]], [[c]], [70], [90], [64])
    parts = torch.empty(70, 40), torch.empty(70, 50)
    tiled._launch_triton_matmul([[a]], [[b[:, :40], b[:, 40:]]], [list(parts)], [70], [40, 50], [64])
    return [(c, a.double() @ b.double()), (torch.cat(parts, 1), a.double() @ b.double())]
