"""What torch has as views of one memory is one here, or a copy that refuses changes which the other would not see."""

import pytest
import torch

import minidl
from minidl import nn
from minidl.tensors import default_device

# Views in torch of what lies in rows; those before the line are copies of what has its channels last.
COPIES = {
    "view": lambda x: x.view(1, -1), "reshape": lambda x: x.reshape(-1), "flatten": lambda x: x.flatten(1),
    "view_as": lambda x: x.view_as(x.new_zeros(x.numel())), "contiguous": lambda x: x.contiguous(),
    "part of a view": lambda x: x.view(-1)[3:],
}  # fmt: skip
VIEWS = {
    "unflatten": lambda x: x.unflatten(1, (1, -1)), "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(2, 0, 1, 3), "T": lambda x: x[0, 0].T, "mT": lambda x: x.mT,
    "narrow": lambda x: x.narrow(1, 0, 1), "chunk": lambda x: x.chunk(2, 1)[1], "split": lambda x: x.split(1, 1)[0],
    "unbind": lambda x: x.unbind(1)[0], "squeeze": lambda x: x[:1].squeeze(0), "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x[:, :1].expand(-1, 2, -1, -1)[:, 0], "diagonal": lambda x: x.diagonal(0, 2, 3),
    "detach": lambda x: x.detach(), "select": lambda x: x.select(1, 0), "slice": lambda x: x[..., ::2],
    "swapaxes": lambda x: x.swapaxes(1, 2), "movedim": lambda x: x.movedim(1, 2), "to": lambda x: x.to(x.dtype),
    "float": lambda x: x.float(), "type_as": lambda x: x.type_as(x), "clone": lambda x: x.clone(),
}  # fmt: skip
CHANGES = {
    "assignment": lambda x: x.__setitem__(..., 0), "zero_": lambda x: x.zero_(), "mul_": lambda x: x.mul_(0),
    "copy_": lambda x: x.copy_(x.clone() * 0), "normal_": lambda x: x.normal_(0, 1e-30),
}  # fmt: skip


def image(m, channels_last):
    x = torch.arange(1.0, 65.0).reshape(2, 2, 4, 4)
    if m is torch:
        return x
    # A result of a convolution has its channels last.
    x = minidl.tensor(x).to(default_device())
    with minidl.no_grad():
        layer = nn.Conv2d(2, 2, 1, bias=False)
        layer.weight.copy_(minidl.eye(2)[:, :, None, None])
        return layer(x) if channels_last else x


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", [*COPIES, *VIEWS])
def test_a_change_of_a_view_is_seen_or_refused(name, channels_last, change):
    pairs = [(x, (COPIES | VIEWS)[name](x)) for x in (image(m, channels_last) for m in (torch, minidl))]
    (expected, theirs), (x, ours) = pairs
    if channels_last and name in COPIES:
        for each, other in ((ours, x), (x, ours)):
            before = other.tolist()
            with pytest.raises(RuntimeError, match="and another one are copies, where torch has views"):
                CHANGES[change](each)
            assert other.tolist() == before
        return
    CHANGES[change](theirs)
    CHANGES[change](ours)
    torch.testing.assert_close(x.data.cpu(), expected, rtol=1e-4, atol=1e-20)
    torch.testing.assert_close(ours.data.cpu(), theirs, rtol=1e-4, atol=1e-20)


def test_a_copy_alone_may_change():
    x = image(minidl, True)
    flat = x.flatten(1)
    del x
    flat += 1
    assert flat[0, :2].tolist() == [2, 3]


def test_what_the_user_laid_out_so_is_copied_as_in_torch():
    x = minidl.zeros(2, 4, 4, 3)
    y = x.permute(0, 3, 1, 2).contiguous()
    y += 1
    assert (x.tolist(), float(y.sum())) == (torch.zeros(2, 4, 4, 3).tolist(), 96)
    z = x.T.view(-1)  # which torch refuses
    with pytest.raises(RuntimeError, match="are copies"):
        z.fill_(1)
