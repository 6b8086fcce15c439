"""The language model of one page: its loss falls, and a cache gives the logits of the complete text."""

import importlib.util
from pathlib import Path

import pytest
import torch

import minidl
from minidl.testing import assert_within

FILE = Path(__file__).parents[2] / "examples" / "character_language_model.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_falls_and_it_writes(example, capsys):
    model, losses = example.main("--steps", "8")
    assert losses[-1] < losses[0] - 0.5
    *_, summary, text = capsys.readouterr().out.split("\n", 2)
    assert f"loss {losses[0]:.3f} -> {losses[-1]:.3f}" in summary
    assert text.startswith("Return the ")
    assert len(text.removesuffix("\n")) == model.context
    assert len(FILE.read_text().splitlines()) < 120


def test_a_cache_gives_the_logits_of_the_complete_text(example):
    minidl.manual_seed(0)
    model = example.LanguageModel(11, 16, 2, 2, 12).double()
    text = minidl.tensor(torch.randint(11, (1, 12)))
    with minidl.no_grad():
        complete = model(text)[0].to_torch()
        caches = [[memory.double() for memory in pair] for pair in model.caches()]
        steps = [model(text[:, i : i + 1], caches, i)[0].to_torch() for i in range(12)]
    # Sums in another order: some hundreds of roundings in float64, of values of size 1.
    assert_within(torch.cat(steps), complete, torch.full_like(complete, 1e-13))


def test_a_position_does_not_see_later_ones(example):
    minidl.manual_seed(0)
    model = example.LanguageModel(11, 16, 2, 1, 12)
    text = torch.randint(11, (1, 12))
    with minidl.no_grad():
        before = model(minidl.tensor(text))[0].to_torch()
        text[0, 7:] = (text[0, 7:] + 1) % 11
        after = model(minidl.tensor(text))[0].to_torch()
    assert torch.equal(before[:7], after[:7])
    assert not torch.equal(before[7:], after[7:])
