"""A script as Triton's tutorials are, of which every line needs a GPU."""

import torch
import triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + y, mask=mask)


def add(x, y):
    output = torch.empty_like(x)
    assert x.device == DEVICE
    assert y.device == DEVICE
    assert output.device == DEVICE
    n_elements = output.numel()
    add_kernel[lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)](x, y, output, n_elements, BLOCK_SIZE=1024)
    return output


def is_cuda():
    return triton.runtime.driver.active.get_current_target().backend == "cuda"


torch.manual_seed(0)
x, y = torch.rand(5000, device=DEVICE), torch.rand(5000, device=DEVICE)
assert add(x, y).equal(x + y)
if is_cuda():
    properties = triton.runtime.driver.active.utils.get_device_properties(DEVICE.index)
    assert properties["multiprocessor_count"] > 0 < properties["max_shared_mem"]
median, low, high = triton.testing.do_bench(lambda: add(x, y), quantiles=[0.5, 0.2, 0.8])
assert 0 < low <= median <= high
print("added", x.device)
