"""What simple methods reach on the same features, by scikit-learn: a score means little without them.

The baselines learn from the training split, the examples that the network learns from. A network spends the validation
split on early stopping; a linear machine with a fixed C needs none, so its score with both splits stands beside.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from minidl.data.records import Pictures
from minidl.training import machine, memory, metrics

LINEAR = "LinearSVC(C=1), same features and training split"
LINEAR_ALL = "LinearSVC(C=1), same features, training and validation split"
PIXELS = "logistic regression on the pixels{}, {}"
LEFT_OUT = "left_out"  # in the place of a baseline's scores: why there are none
# Seconds for a value of an example and a class, over all iterations: 4 to 13e-8 were measured for the support vector
# machine, 1 to 3e-8 for the logistic regression.
_SECONDS = {"LinearSVC": 1e-7, "LogisticRegression": 2e-8}
_MOST_SECONDS = 200.0
_MOST_BYTES = 2**31
_COPIES = 3  # of the coefficients: the library's, its caller's and a transposed one
_MOST_DECIDED = 2**24  # values of the test split's decision function at a time
_MOST_PIXELS = 1024  # values of a picture that the logistic regression gets

Split = tuple[Any, np.ndarray]  # features (scipy CSR, array [N, F] or Pictures) and targets [N]

_INTERRUPTED = "Training interrupted by user"


def classification(train: Split, validation: Split, test: Split, classes: int) -> dict[str, Any]:
    """{"majority", "linear", "linear_all"}: always the largest class; a linear support vector machine, C = 1; the same
    with the validation split as further training examples. On pictures the machine is a logistic regression."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    linear, methods = LinearSVC(C=1.0, random_state=0), [LINEAR, LINEAR_ALL]
    if isinstance(train[0], Pictures):
        # A support vector machine takes minutes on 60,000 pictures.
        step = _step(train[0].shape)
        shrunk = f", means of {step} x {step}" if step > 1 else ""
        linear = LogisticRegression(C=1.0, max_iter=100)
        methods = [PIXELS.format(shrunk, data) for data in ("training split", "training and validation split")]
        train, validation, test = ((_flat(x, step), y) for x, y in (train, validation, test))
    scores: dict[str, Any] = {"majority": majority(train[1], test[1], classes)}
    parts = train, _joined(train, validation)
    for name, method, part in zip(("linear", "linear_all"), methods, parts, strict=True):
        scores[name] = {"method": method, **_linear(linear, part, test, classes)}
    return scores


def _linear(linear: Any, train: Split, test: Split, classes: int) -> dict[str, Any]:
    """The scores of a linear machine, or why it is left out."""
    x, y = train
    problems = classes if classes > 2 else 1
    need = _COPIES * problems * x.shape[1] * 8
    most = min(_MOST_BYTES, (machine.free() or _MOST_BYTES * 2) // 2)
    if need > most:
        what = f"its coefficients, {problems:,} x {x.shape[1]:,} in float64"
        return {LEFT_OUT: f"{what}, take {memory.size(need)} in all, expected at most {memory.size(most)}"}
    values = x.shape[0] + (x.size if isinstance(x, np.ndarray) else x.nnz)
    seconds = _SECONDS[type(linear).__name__] * problems * values
    if seconds > _MOST_SECONDS:
        what = f"its {values:,} values for each of {problems:,} classes"
        return {LEFT_OUT: f"{what} take about {seconds / 60:.0f} minutes, expected at most {_MOST_SECONDS / 60:.0f}"}
    fitted = _fitted(linear, x, y)
    step = max(1, _MOST_DECIDED // problems)
    parts = [fitted.predict(test[0][start : start + step]) for start in range(0, len(test[1]), step)]
    return metrics.classification(test[1], np.concatenate(parts), classes)


def majority(train_y: np.ndarray, test_y: np.ndarray, classes: int) -> dict[str, float]:
    """Scores of always answering the most frequent of the training labels."""
    constant = np.full(len(test_y), np.bincount(train_y, minlength=classes).argmax())
    return metrics.classification(test_y, constant, classes)


def regression(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, mean: float, scale: float
) -> dict[str, Any]:
    """{"mean", "ridge", "mlp"}; y are standardised with `mean` and `scale`, scores are in the target's units."""
    from sklearn.linear_model import RidgeCV
    from sklearn.neural_network import MLPRegressor

    ridge = RidgeCV(alphas=np.logspace(-3, 3, 25)).fit(train_x, train_y)
    enough = len(train_y) >= 20  # it takes a tenth of the rows as its own validation split
    mlp = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=enough, max_iter=500, random_state=0)
    mlp = _fitted(mlp, train_x, train_y)
    truth = test_y.astype(np.float64) * scale + mean

    def scores(predicted: np.ndarray) -> dict[str, float]:
        return metrics.regression(truth, predicted * scale + mean)

    return {
        "mean": scores(np.full(len(test_y), float(train_y.mean()))),
        "ridge": {"method": f"RidgeCV, alpha {ridge.alpha_:.3g}", **scores(ridge.predict(test_x))},
        "mlp": {"method": "MLPRegressor(64, 64), early stopping", **scores(mlp.predict(test_x))},
    }


def _step(shape: tuple[int, ...]) -> int:
    """The side of the blocks whose means leave at most _MOST_PIXELS values of a picture."""
    _, height, width, channels = shape
    step = 1
    while -(-height // step) * -(-width // step) * channels > _MOST_PIXELS:
        step += 1
    return step


def _flat(pictures: Pictures, step: int) -> np.ndarray:
    """float32 [N, values] from 0 to 1: means of blocks of step x step pixels, smaller ones at the ends."""
    shrunk: np.ndarray = pictures.pixels.astype(np.float32)
    for axis in (1, 2):
        starts = np.arange(0, shrunk.shape[axis], step)
        counts = np.diff(np.append(starts, shrunk.shape[axis])).astype(np.float32)
        shape = [-1 if i == axis else 1 for i in range(4)]
        shrunk = np.add.reduceat(shrunk, starts, axis=axis) / counts.reshape(shape)
    return shrunk.reshape(len(shrunk), -1) / np.float32(255)


def _joined(first: Split, second: Split) -> Split:
    from scipy import sparse

    stack = sparse.vstack if sparse.issparse(first[0]) else np.concatenate
    return stack([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _fitted(machine: Any, x: Any, y: np.ndarray) -> Any:
    """The machine after it has learnt, also if it stopped before it converged.

    Raises KeyboardInterrupt, for which scikit-learn's networks only warn, and end as if they had learnt.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="The number of unique classes")  # many, for so few examples
        warnings.filterwarnings("error", message=_INTERRUPTED)
        try:
            return machine.fit(x, y)
        except UserWarning as warning:
            if str(warning).startswith(_INTERRUPTED):
                raise KeyboardInterrupt from None
            raise
