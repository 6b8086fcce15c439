"""The pictures: what they are called, what is marked in them, and names that matplotlib would read as formulas."""

import numpy as np
import pytest
from PIL import Image

from minidl.training.report import plot_processes, plots

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every picture that is written."""
    found, finished = {}, []
    finish, save = plots._labelled, plot_processes.save

    def keep(figure, axes, *texts):
        finished.append(axes)
        return finish(figure, axes, *texts)

    def name(folder, pictures):
        save(folder, pictures)
        found.update(zip(pictures, finished, strict=True))
        finished.clear()

    monkeypatch.setattr(plots, "_labelled", keep)
    monkeypatch.setattr(plot_processes, "save", name)
    return found


def history(epochs):
    return [
        {"epoch": i, "loss": 1 / i, "validation": {"loss": 2 / i, "accuracy": 1 - 1 / i, "macro_f1": 0.1}}
        for i in range(1, epochs + 1)
    ]


@pytest.mark.parametrize("epochs", [1, 2, 3, 40])
def test_curves(drawn, tmp_path, epochs):
    plots.curves(tmp_path, history(epochs), 1, "a.csv: test accuracy 0.9", "cross-entropy", ["dropout", "x", "y"])
    axes = drawn["loss.png"]
    assert axes.get_title() == "a.csv: test accuracy 0.9"
    assert axes.get_ylabel() == "cross-entropy"
    names = axes.get_legend_handles_labels()[1]
    assert names == ["training, with dropout, x and y", "validation, without", "kept: epoch 1"]
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks
    assert all(tick == int(tick) for tick in ticks)
    assert drawn["scores.png"].get_legend_handles_labels()[1] == ["accuracy", "macro-F1", "kept: epoch 1"]


def test_equal_losses_have_plain_names(drawn, tmp_path):
    plots.curves(tmp_path, history(2), 2, "a", "loss", [])
    assert drawn["loss.png"].get_legend_handles_labels()[1] == ["training", "validation", "kept: epoch 2"]


def test_a_confusion_matrix_has_a_colour_key_and_plain_names(drawn, tmp_path):
    truth, predicted = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    plots.confusion(tmp_path, truth, predicted, ["$a_{b", "$$ two\nlines of a name that is very long"], "a")
    axes = drawn["confusion.png"]
    assert [other.get_ylabel() for other in axes.figure.axes] == ["true", "share of the true class"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [r"\$a_{b", r"\$\$ two lines of a name …"]


def test_of_many_classes_those_are_drawn_that_are_most_confused(drawn, tmp_path):
    truth = np.arange(1000)
    predicted = np.where(truth < 100, truth // 10, truth)
    plots.confusion(tmp_path, truth, predicted, [f"class {i}" for i in truth], "a")
    axes = drawn["confusion.png"]
    assert axes.get_title() == "a\nthe 40 classes of 1,000 that are confused most often"
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:10] == [f"class {i}" for i in range(10)]
    assert len(names) == 40


def test_names_in_any_script_are_drawn_without_a_warning(drawn, tmp_path):
    # Warnings are errors here.
    names = ["\N{CJK UNIFIED IDEOGRAPH-732B}", "\x1b[31mred"]
    plots.confusion(tmp_path, np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1]), names, "two classes")
    assert [label.get_text() for label in drawn["confusion.png"].get_yticklabels()][1] == r"\u001b[31mred"


def test_large_predictions_have_whole_tick_labels(drawn, tmp_path):
    truth = 1.5e9 + 1000 * np.arange(20.0)
    plots.predictions(tmp_path, truth, truth + 50, "price $", "a")
    axes = drawn["predictions.png"]
    for axis in (axes.xaxis, axes.yaxis):
        assert axis.get_major_formatter()(1.5e9 + 5000) == "1,500,005,000"
        assert axis.get_offset_text().get_text() == ""
    assert axes.get_xlabel() == r"true price \$"


@pytest.mark.parametrize(("channels", "wrong"), [(1, 0), (3, 1), (1, 50)])
def test_mistakes_are_shown_most_confident_first(tmp_path, monkeypatch, channels, wrong):
    written = []
    monkeypatch.setattr(plots, "_png", lambda figure: written.append(figure) or b"")
    pixels = np.zeros((60, 5, 4, channels), dtype=np.uint8)
    truth = np.zeros(60, dtype=np.int64)
    probabilities = np.tile([1.0, 0.0], (60, 1))
    probabilities[:wrong, 1] = np.linspace(0.6, 0.9, wrong)
    probabilities[:wrong, 0] = 1 - probabilities[:wrong, 1]
    names = ["a $1", "b" * 90]
    plots.mistakes(tmp_path, pixels, truth, probabilities.argmax(1), probabilities.max(1), names, "digits")
    (figure,) = written
    titles = [axes.get_title() for axes in figure.axes if axes.get_title()]
    assert len(titles) == min(wrong, 40)
    assert figure.get_suptitle() == f"digits; the most confident of {wrong} mistakes"
    if wrong:
        assert titles[0].startswith("b" * 14 + (" 90%" if wrong > 1 else " 60%"))
        assert titles[0].endswith(r"true: a \$1")


@pytest.mark.parametrize("shape", [(32, 1, 3, 3), (9, 3, 5, 5), (3, 7, 1, 1)])
def test_filters_are_shown(tmp_path, shape):
    plots.filters(tmp_path, np.random.default_rng(0).normal(size=shape).astype(np.float32), "digits")
    assert (tmp_path / "filters.png").exists() == (shape[2] >= 5), "smaller filters show nothing"
    plots.filters(tmp_path, np.zeros(shape, dtype=np.float32), "digits")


@pytest.mark.parametrize("epochs", [1, 5])
def test_gan_curves(tmp_path, epochs):
    figures = {"loss_d": 1.2, "loss_g": 0.8, "d_real": 0.6, "d_fake": 0.4}
    plots.gan_curves(tmp_path, [{"epoch": i, **figures} for i in range(1, epochs + 1)], "a$b.csv")
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.size == (1200, 504)
