"""Weights in files, and the state of convolutions in the order that files have."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model

import minidl
from minidl import nn, optim
from minidl.tensors import Tensor


def network(framework=nn):
    return framework.Sequential(framework.Conv2d(3, 8, 3), framework.BatchNorm2d(8), framework.Conv2d(8, 2, 1))


def equal(own, given):
    return own.keys() == given.keys() and all(torch.equal(own[name].cpu(), given[name].cpu()) for name in own)


def test_safetensors_and_torch_write_a_module(tmp_path):
    model = network()
    save_model(model, tmp_path / "own.safetensors")
    assert equal(load_file(tmp_path / "own.safetensors"), model.state_dict())
    assert load_model(network(), tmp_path / "own.safetensors") == (set(), [])
    torch.save(model.state_dict(), tmp_path / "own.pt")  # noqa: TID251
    read = torch.load(tmp_path / "own.pt")  # noqa: TID251
    assert equal(read, model.state_dict())
    assert {type(tensor) for tensor in read.values()} == {torch.Tensor}
    other = network(torch.nn)
    other.load_state_dict(model.state_dict())
    assert equal(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("what", ["module", "state"])
def test_a_module_goes_through_a_file(what, tmp_path):
    model, other = network(), network()
    minidl.save(model if what == "module" else model.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(minidl.load(tmp_path / "model.safetensors"))
    assert equal(other.state_dict(), model.state_dict())
    assert equal(load_file(tmp_path / "model.safetensors"), model.state_dict())
    assert minidl.load(tmp_path / "model.safetensors", map_location="meta")["0.weight"].is_meta


def test_a_checkpoint_goes_through_a_file(tmp_path):
    model, fresh = network(), network()
    optimizer, again = (optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, fresh))
    tied = torch.ones(4)
    for parameter in model.parameters():
        parameter.grad = Tensor(torch.ones_like(parameter.data))
    optimizer.step()
    minidl.save(
        {
            "model": model, "optimizer": optimizer.state_dict(), "epoch": np.int64(3), "seen": [tied, (tied, None)],
            "model.0.bias": Tensor(torch.zeros(2)),
        },
        tmp_path / "checkpoint",
    )  # fmt: skip
    read = minidl.load(tmp_path / "checkpoint")
    fresh.load_state_dict(read["model"])
    again.load_state_dict(read["optimizer"])
    for m, o in ((model, optimizer), (fresh, again)):
        for parameter in m.parameters():
            parameter.grad = Tensor(torch.ones_like(parameter.data))
        o.step()
    assert equal(fresh.state_dict(), model.state_dict())
    assert (read["epoch"], read["seen"][1][1], read["model.0.bias"].tolist()) == (3, None, [0.0, 0.0])


def test_what_is_not_written_or_read(tmp_path):
    with pytest.raises(TypeError, match=r"minidl\.save: a\.1 is a object"):
        minidl.save({"a": [1, object()]}, tmp_path / "x")
    with pytest.raises(TypeError, match=r"the dict has the key 1\.5"):
        minidl.save({1.5: 1}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    torch.save({"a": torch.ones(1)}, tmp_path / "x")  # noqa: TID251
    with pytest.raises(ValueError, match=r"minidl\.load reads safetensors, torch\.load what torch\.save wrote"):
        minidl.load(tmp_path / "x")


def test_any_name_any_overlap_and_numpys_bool(tmp_path):
    x = torch.arange(4.0)
    given = {"__metadata__": torch.ones(2), "all": x, "tail": x[1:], "done": np.bool_(True)}
    minidl.save(given, tmp_path / "x")
    read = minidl.load(tmp_path / "x")
    assert list(read) == list(given)
    assert read["done"] is True
    assert all(torch.equal(read[name], given[name]) for name in ("__metadata__", "all", "tail"))


def test_what_has_no_end_or_no_strides_is_refused(tmp_path):
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="contains itself"):
        minidl.save(endless, tmp_path / "x")
    with pytest.raises(TypeError, match=r"a\.b is of layout torch\.sparse_coo"):
        minidl.save({"a": {"b": torch.eye(2).to_sparse()}}, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        minidl.load(tmp_path)


@pytest.mark.parametrize(
    "tree", ['{"tensor":"zz"}', '{"list":5}', "[" * 100_000, '{"foo":[1]}', "{", '{"dict":[[1]]}', '{"dict":{"a":1}}']
)
def test_a_structure_of_another_hand_is_refused(tree, tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x", metadata={"minidl.tree": tree})
    with pytest.raises(ValueError, match=r"its metadata minidl\.tree is not the structure"):
        minidl.load(tmp_path / "x")
