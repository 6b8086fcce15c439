"""Drawing a graph: every operation, leaf and arrow is there, as DOT and as SVG."""

import xml.etree.ElementTree as ET

import pytest
import torch

from minidl import draw, nn, ops
from minidl.tensors import Tensor, default_device


def loss_of(model):
    x = Tensor(torch.randn(3, 4, device=default_device()))
    return ops.sum(model(x))


def test_dot_names_operations_and_parameters():
    model = nn.MLP(4, [5], 2)
    dot = draw(loss_of(model), model).dot
    for text in ("Linear", "Sum", "0.weight\\n5 x 4", "1.bias\\n2", "scalar"):
        assert text in dot
    assert dot.count("->") == 6


def test_svg_is_well_formed_and_boxes_do_not_overlap():
    model = nn.MLP(4, [5, 6, 7], 2)
    drawing = draw(loss_of(model), model)
    root = ET.fromstring(drawing.svg)
    boxes = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("rx")]
    assert len(boxes) == len(drawing.boxes) == 13
    places = [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in boxes]
    width, height = float(root.get("width")), float(root.get("height"))
    for i, (x, y, w, h) in enumerate(places):
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        for x2, y2, w2, h2 in places[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_a_value_used_twice_is_one_box():
    x = Tensor(torch.ones(2, device=default_device()), requires_grad=True)
    drawing = draw(x * x, {"x": x})
    assert [box.title for box in drawing.boxes] == ["x", "Mul"]
    assert drawing.arrows == ((0, 1), (0, 1))


def test_save_by_ending(tmp_path):
    drawing = draw(loss_of(nn.MLP(4, [], 2)))
    assert drawing.save(tmp_path / "g.svg").read_text().startswith("<svg")
    assert drawing.save(tmp_path / "g.dot").read_text().startswith("digraph")
    assert drawing.save(tmp_path / "new" / "folder" / "g.svg").read_text() == drawing.svg
    with pytest.raises(ValueError, match=r"must end in \.svg or \.dot"):
        drawing.save(tmp_path / "g.png")


def test_nothing_recorded():
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        draw(Tensor(torch.ones(1)))


def test_names_are_escaped():
    x = Tensor(torch.ones(1, device=default_device()), requires_grad=True)
    drawing = draw(x * 2.0, {'<b>"&': x})
    ET.fromstring(drawing.svg)
    assert '\\"' in drawing.dot
