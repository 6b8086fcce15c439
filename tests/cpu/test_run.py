"""Kernels compiled for the CPU; run with `--device compiled`."""

import pytest
import torch
import triton
import triton.language as tl

import minidl
from minidl import nn, ops, optim
from minidl.runtime import launch
from minidl.runtime.cost_model import devices, selection

pytestmark = pytest.mark.skipif(not launch.COMPILED_CPU, reason="kernels are not compiled for the CPU here")


def _step(x, target, dtype):
    minidl.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 49, 10)).to(dtype)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        loss = ops.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [loss.detach().to_torch(), *(p.detach().to_torch() for p in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_the_number_of_threads_changes_no_bit(dtype):
    x, target = minidl.tensor(torch.randn(33, 3, 14, 14, dtype=dtype)), minidl.tensor(torch.arange(33) % 10)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4, 1):
            torch.set_num_threads(count)
            results.append(_step(x, target, dtype))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert all(torch.isfinite(value).all() for value in results[0])


@triton.jit
def _sum_to_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
    """Write the sums of x[0 : i + 1] by a loop that carries a block and a number, and by a scan."""
    b_sum = tl.zeros([BLOCK], dtype=tl.float32)
    o = tl.arange(0, BLOCK)
    i = 0
    while i < n:
        b_sum += tl.where(o >= i, tl.load(p_x + i), 0.0)
        i += 1
    b_x = tl.load(p_x + o, mask=o < n, other=0.0)
    tl.store(p_y + o, b_sum, mask=o < n)
    tl.store(p_y + n + o, tl.cumsum(b_x, 0), mask=o < n)


@pytest.mark.parametrize("n", [0, 1, 7, 64])
def test_loops_carry_blocks_and_scans_agree_with_them(n):
    x = torch.randint(-9, 9, (64,)).float()
    y = torch.full((2 * n + 1,), -1.0)
    launch.run(_sum_to_kernel, (1,), x, y, n, BLOCK=64)
    assert torch.equal(y[:n], x[:n].cumsum(0))
    assert torch.equal(y[n : 2 * n], x[:n].cumsum(0))
    assert y[2 * n] == -1


@triton.jit
def _count_kernel(p_x):
    tl.atomic_add(p_x, 1)


def test_atomics_are_refused_with_their_line():
    with pytest.raises(NotImplementedError, match=r"test_run.py:\d+: tt.atomic_rmw is not supported on the CPU"):
        launch.run(_count_kernel, (4,), torch.zeros(1, dtype=torch.int32))


def test_a_tensor_on_the_cpu_is_where_new_tensors_are():
    assert minidl.zeros(3).device.type == "cpu"


@triton.jit
def _absolute_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o, mask=o < n, other=0)
    tl.store(p_y + o, tl.abs(b_x), mask=o < n)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_absolute_values(dtype):
    x = torch.tensor([-7, 0, 9, torch.iinfo(dtype).min if not dtype.is_floating_point else -0.0], dtype=dtype)
    y = torch.empty_like(x)
    launch.run(_absolute_kernel, (1,), x, y, len(x), BLOCK=16)
    assert torch.equal(y, x.abs())


def test_replayed_calls_read_their_new_tensors():
    total = minidl.tensor(torch.zeros(3))
    for _ in range(5):
        x = minidl.tensor(torch.randn(3, 700))
        assert torch.allclose(ops.sum(x, 1).to_torch(), x.to_torch().sum(1), atol=1e-4)
        total = ops.add(total, ops.sum(x, 1))
    before = total.to_torch().clone()
    ops.add(total, total)
    assert torch.equal(total.to_torch(), before)


def test_plans_have_estimates_of_a_cpu_and_recorded_ones_those_of_their_gpu():
    file = devices.of_file(devices.usual("cpu"))
    assert selection.of(launch.target()) is file
    with launch.record(lambda *launched: None, "sm_80"):
        assert selection.of("sm_80") is devices.of_file(devices.usual("sm_80")) is not file
