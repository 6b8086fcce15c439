"""A script that names "cuda" in torch's many ways, and relies on its memory being another than the CPU's."""

import threading

import torch
import triton
import triton.language as tl


@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n, other=0.0), mask=i < n)


def doubled(x):
    assert x.is_cuda
    assert not x.is_cpu
    assert (x.device.type, x.get_device()) == ("cuda", 0)
    with torch.cuda.device(x.device):
        double[(triton.cdiv(x.numel(), 64),)](x, x.numel(), BLOCK=64)
    return x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x.clone())

    @staticmethod
    def backward(ctx, dy):
        return doubled(dy + torch.zeros(1, device="cuda"))


assert torch.cuda.is_available()
assert torch.cuda.device_count() >= 1
assert torch.cuda.get_device_capability() >= (8, 0)
assert torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count > 0
assert isinstance(torch.cuda.get_device_name(), str)
device = torch.device("cuda")

# From the CPU to the GPU and back: copies.
host = torch.randn(100)
assert (host.device.type, host.is_cuda) == ("cpu", False)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
there = host.cuda()
start.record()
doubled(there)
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
assert there.cpu().equal(2 * host)
assert not there.cpu().is_cuda
assert there.cuda() is there
assert there.to(device) is there
assert doubled(host.to("cuda:0", torch.float64)).cpu().equal(2 * host.double())
assert doubled(host.pin_memory().to(device, non_blocking=True)).cpu().equal(2 * host)
doubled(there.cpu().to(there))
assert there.cpu().equal(2 * host)

# Functions that make tensors, and defaults.
torch.testing.assert_close(doubled(torch.ones(10, device=0)), torch.full((10,), 2.0, device="cuda"))
doubled(torch.randn(3, generator=torch.Generator(device).manual_seed(1), device=device))
with device:
    doubled(torch.zeros(3))
assert not torch.zeros(3).is_cuda
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    doubled(torch.zeros(3, device=device))
torch.cuda.current_stream().wait_stream(stream)

# Gradients, networks and threads.
leaf = torch.randn(5, device="cuda", requires_grad=True)
Double.apply(leaf).sum().backward()
assert leaf.grad.is_cuda
assert leaf.grad.tolist() == [2] * 5
assert torch.autograd.grad(Double.apply(leaf).sum(), leaf)[0].tolist() == [2] * 5
network = torch.nn.Linear(3, 4).to(device)
optimizer = torch.optim.AdamW(network.parameters())
network(torch.randn(2, 3, device=device)).sum().backward()
optimizer.step()
assert next(network.parameters()).is_cuda
seen = []
thread = threading.Thread(target=lambda: seen.append(doubled(torch.ones(3, device="cuda")).tolist()))
thread.start()
thread.join()
assert seen == [[2, 2, 2]]
torch.set_default_device("cuda")
doubled(torch.ones(3))
print("done")
