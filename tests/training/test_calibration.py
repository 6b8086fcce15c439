"""The temperature of a classification, the error of its probabilities, and answers above a threshold."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.errors import DamagedError
from minidl.training.loop.targets import Classification, probabilities
from minidl.training.report import calibration
from minidl.training.run_folder.manifest import RunFiles

LOGITS = np.random.default_rng(0).normal(size=(4000, 5)).astype(np.float32) * 3


HEAD = '{"format": "minidl-calibration", "version": 1, "temperature": '


def _labels(logits, seed=1):
    """Draw a label for each row, with the probabilities softmax(logits)."""
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return (shares.cumsum(1) > np.random.default_rng(seed).random((len(logits), 1))).argmax(1)


@pytest.mark.parametrize("expected", [0.25, 1.0, 4.0])
def test_the_temperature_of_which_labels_were_drawn(expected):
    truth = _labels(LOGITS / expected)
    result = calibration.temperature([LOGITS[:1000], LOGITS[1000:]], truth)
    assert abs(math.log(result / expected)) < 0.1
    logits = LOGITS.astype(np.float64)

    def loss(temperature):
        z = logits / temperature
        return (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), truth]).mean()

    assert loss(result) <= min(loss(result * 1.01), loss(result / 1.01), loss(1.0))


def test_extreme_logits_have_a_finite_temperature():
    logits = np.array([[1e30, 0], [0, 1e30]], dtype=np.float32)
    for truth in (np.array([0, 1]), np.array([1, 0])):
        assert 0 < calibration.temperature([logits], truth) < 21


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60))
def test_the_error_is_that_of_its_definition(pairs):
    confidence, right = np.array([p for p, _ in pairs]), np.array([r for _, r in pairs])
    total = 0.0
    for low in range(calibration.BINS):
        inside = [i for i, p in enumerate(confidence) if min(int(p * calibration.BINS), calibration.BINS - 1) == low]
        if inside:
            total += len(inside) / len(pairs) * abs(right[inside].mean() - confidence[inside].mean())
    entries = calibration.bins(confidence, right)
    assert calibration.error(entries) == pytest.approx(total, abs=1e-12)
    assert 0 <= calibration.error(entries) <= 1
    assert sum(entry["count"] for entry in entries) == len(pairs)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30), st.floats(0, 1))
def test_answers_above_a_threshold(pairs, threshold):
    confidence, right = np.array([p for p, _ in pairs]), np.array([r for _, r in pairs])
    answered = [r for p, r in pairs if round(p, 6) >= threshold]
    entry = calibration.answered(confidence, right, threshold)
    assert entry["coverage"] == pytest.approx(len(answered) / len(pairs))
    assert entry["accuracy"] == (pytest.approx(sum(answered) / len(answered)) if answered else None)


@given(st.floats(0.05, 20))
def test_a_temperature_changes_no_label(temperature):
    targets = Classification(list("abcde"), temperature, 0.9)
    parts = [LOGITS[:50]]
    predictions = targets.predictions(parts, confidence=True)
    assert (predictions.values == LOGITS[:50].argmax(1)).all()
    shares = probabilities(LOGITS[:50], temperature)
    np.testing.assert_allclose(predictions.confidence, shares.max(1), rtol=1e-6)
    np.testing.assert_allclose(predictions.before, probabilities(LOGITS[:50]).max(1), rtol=1e-6)
    for answer, share in zip(targets.answers(parts, 1), shares, strict=True):
        label = answer["top"][0]["label"]
        assert share["abcde".index(label)] == share.max()
        assert answer["label"] == (label if share.max() >= 0.9 else None)


@pytest.mark.parametrize(
    "content", ["{}", "3", "[1]", "{", *(HEAD + end for end in ("0}", '"1"}', "NaN}", '1, "a": 1}'))]
)
def test_another_temperature_is_refused(content, tmp_path):
    run = RunFiles(tmp_path, "run", {}, None)
    assert calibration.of_run(run) == 1.0
    (tmp_path / calibration.FILE).write_text(content)
    with pytest.raises(DamagedError, match=r"calibration.json is damaged"):
        calibration.of_run(run)
