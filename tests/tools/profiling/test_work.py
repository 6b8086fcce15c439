"""What a launch is said to do: counted by hand for shapes that are known."""

import ast
from pathlib import Path

import pytest
import torch

from minidl import ops
from minidl.kernels import conv, gemm, softmax
from minidl.kernels.conv.geometry import Geometry
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.tools.profiling.table import floor_us
from minidl.tools.profiling.work import BYTES_UNKNOWN, PRODUCTS, Work, work_of

KERNELS = Path(gemm.__file__).parents[1]


def works(call):
    """The work of each launch of a call."""
    found = []

    def watcher(kernel, grid, args, meta, go):
        found.append(work_of(kernel, grid, args, meta))
        go()

    with launch.watch(watcher):
        call()
    return found


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=default_device())


@pytest.mark.parametrize("form", ["tma", "pointer"])
def test_a_product_is_two_operations_for_each_pair(form):
    # Both along K: others a GPU copies first.
    (work,) = works(lambda: gemm.gemm(zeros(48, 32), zeros(80, 32).t(), zeros(80), form=form, split=1))
    assert work.kernel == f"gemm_{form}_kernel"
    assert work.flop == 2 * 48 * 32 * 80
    assert work.bytes == 4 * (48 * 32 + 32 * 80 + 80 + 48 * 80)
    assert work.rate == "tf32x3"


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, "ieee"), (torch.float16, "ieee"), (torch.float64, "float64")], ids=str
)
def test_a_thin_product_has_the_rate_of_its_accumulators(dtype, rate):
    operands = zeros(48, 32, dtype=dtype), zeros(32, 4, dtype=dtype)
    (work,) = works(lambda: gemm.gemm(*operands, form="thin"))
    assert (work.kernel, work.flop, work.rate) == ("gemm_thin_kernel", 2 * 48 * 32 * 4, rate)


def test_a_product_in_parts_is_counted_where_it_is_done():
    found = works(lambda: gemm.gemm(zeros(48, 32), zeros(32, 80), form="parts", split=1))
    assert [(work.kernel, work.flop, work.rate) for work in found] == [
        ("parts_kernel", None, None), ("parts_kernel", None, None),
        ("gemm_parts_kernel", 2 * 48 * 32 * 80, "tf32x3"), ("gemm_tma_kernel", None, None),
    ]  # fmt: skip


def test_batches_and_shares_of_a_product_are_counted_once():
    (work,) = works(lambda: gemm.gemm(zeros(3, 16, 32), zeros(3, 32, 8)))
    assert work.flop == 2 * 3 * 16 * 32 * 8
    shares = works(lambda: gemm.gemm(zeros(16, 8192), zeros(16, 8192).t(), split=4, form="pointer"))
    assert [(work.kernel, work.flop) for work in shares] == [
        ("gemm_pointer_kernel", 2 * 16 * 8192 * 16), ("gemm_sum_kernel", None),
    ]  # fmt: skip
    half = works(lambda: gemm.gemm(zeros(16, 16, dtype=torch.float16), zeros(16, 16, dtype=torch.float16)))
    assert half[0].rate == "float16"


@pytest.mark.parametrize(
    ("form", "kernel"), [("pixel", "conv_pixel_kernel"), ("box", "conv_box_kernel"), ("batch", "conv_batch_kernel")]
)
def test_a_convolution_is_two_operations_for_each_tap_of_each_output(form, kernel):
    x = zeros(2, 32, 6, 6).to(memory_format=torch.channels_last)
    weight = zeros(64, 32, 3, 3).to(memory_format=torch.channels_last)
    found = works(lambda: ops.conv2d(Tensor(x), Tensor(weight), padding=1, form=form))
    (work,) = [work for work in found if work.kernel == kernel]
    assert work.flop == 2 * (2 * 6 * 6 * 64) * (32 * 3 * 3)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("form", ["pixel", "batch"])
def test_gradients_of_a_convolution_have_its_operations(form, stride):
    """With a stride the way back is one kernel, or one for each pair of walks; together they have all taps."""
    geometry = Geometry.of((8, 8), (4, 4), (stride, stride), ((0, 0), (0, 0)), (1, 1), 1)
    outputs = geometry.h.output
    x, dy, w = (
        zeros(*shape).to(memory_format=torch.channels_last)
        for shape in ((64, 32, 8, 8), (64, 64, outputs, outputs), (64, 32, 4, 4))
    )
    operations = 2 * (64 * outputs * outputs * 64) * (32 * 4 * 4)
    (weight,) = [
        found.flop
        for found in works(lambda: conv.grad_weight(x, dy, geometry, form=form))
        if found.kernel.endswith("grad_weight_kernel")
    ]
    assert weight == operations
    found = [work.flop for work in works(lambda: conv.grad_input(dy, w, geometry, form=form)) if work.flop is not None]
    # Taps beyond the border count: each of the 8 x 8 results has all of its taps, of which a stride leaves a part.
    walks = 2 * (64 * 8 * 8 * 32) * (64 * 4 * 4) // stride**2
    assert sum(found) == (operations if form in ("batch", "pixel") and stride == 2 else walks)


def test_memory_that_several_arguments_share_is_counted_once():
    x = zeros(64, 32)
    (work,) = works(lambda: ops.relu(Tensor(x)))
    assert work.bytes == 2 * 4 * 64 * 32
    assert (work.flop, work.rate) == (None, None)
    (work,) = works(lambda: softmax.softmax(x, -1))
    assert work.bytes == 2 * 4 * 64 * 32


def test_what_is_repeated_is_counted_as_it_lies():
    row = zeros(32).expand(64, 32)
    (work,) = works(lambda: ops.add(Tensor(row), Tensor(zeros(64, 32))))
    assert work.bytes == 4 * (32 + 64 * 32 + 64 * 32)


def test_the_tables_name_kernels_that_are_there():
    defined = {
        node.name
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert {*PRODUCTS, *BYTES_UNKNOWN} <= defined


def work(**changed):
    plain = Work("k", (1, 1, 1), 128, "M=16", bytes=4_300_000, flop=None, rate=None)
    return plain._replace(**changed)


def test_the_floor_is_the_larger_of_both_times():
    assert floor_us(work(), "NVIDIA H200") == pytest.approx(1.0)
    assert floor_us(work(flop=7.9e9, rate="float16"), "NVIDIA H200") == pytest.approx(10.0)
    assert floor_us(work(flop=7.9e6, rate="float16"), "NVIDIA H200") == pytest.approx(1.0)
    assert floor_us(work(flop=4e9, rate="tf32x3"), "NVIDIA H200") == pytest.approx(30.0)


def test_an_unknown_device_or_work_has_no_floor():
    assert floor_us(work(), "NVIDIA H100") is None
    assert floor_us(work(), None) is None
    assert floor_us(work(bytes=None), "NVIDIA H200") is None
    assert floor_us(work(flop=1, rate="float64"), "NVIDIA H200") is None
