"""Scores of simple baselines of scikit-learn on the same features, to compare with.

The baselines learn from the training split, as the network does. A network needs the validation split for early
stopping; a linear classifier with a fixed C does not, so a second one learns from both splits. While a GPU trains the
network, other processes fit the linear classifiers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from minidl.data.records import Pictures
from minidl.data.workers import Message, WorkerError, Workers, available
from minidl.training.process import memory_limit, out_of_memory
from minidl.training.report import metrics

_METHODS = {
    "LinearSVC": "LinearSVC(C=1), same features and training split",
    "SGDClassifier": "SGDClassifier(alpha=0.0001), same features and training split",
    "LogisticRegression": "logistic regression on the pixels{}, training split",
}
LEFT_OUT = "left_out"  # key of the reason why a baseline has no scores
# Seconds per value of an example and class, over all iterations: measured 4 to 13e-8 for the support vector machine, 1
# to 3e-8 for the logistic regression, 6e-8 for stochastic gradients. The first may take 1e-6 if classes overlap: 14 s
# for 42,001 texts of eight classes, and stochastic gradients 0.8 s for the same accuracy.
_SECONDS = {"LinearSVC": 1e-7, "LogisticRegression": 2e-8, "SGDClassifier": 6e-8}
_MOST_SECONDS = 200.0
_MOST_BYTES = 2**31
_COPIES = 3  # of the coefficients: the library's, its caller's and a transposed one
_MOST_DECISIONS = 2**24  # values of the test split's decision function in a batch
_MOST_PIXELS = 1024  # values of a picture for the logistic regression
_POOLING_BATCH = 32  # pictures
_MOST_EXACT = 20_000  # examples for the exact solver of the support vector machine
_PARAMETERS = ("coef_", "intercept_", "classes_")

Split = tuple[Any, np.ndarray]  # features (scipy CSR, array [N, F] or Pictures) and targets [N]

_INTERRUPTED = "Training interrupted by user"


class Linear:
    """Linear classifiers, which the processes of `workers` begin to fit at once; without `workers`, `scores` fits them.

    A support vector machine with C = 1, and the same with the validation split as further training examples: by
    LinearSVC up to 20,000 examples, by stochastic gradients above. For pictures, logistic regressions.
    """

    def __init__(self, train: Split, validation: Split, classes: int, workers: Workers | None = None) -> None:
        self.classes, self._train_y = classes, train[1]
        self._prepare: Callable[[Any], Any] = lambda x: x
        if isinstance(train[0], Pictures):
            # A support vector machine takes minutes on 60,000 pictures.
            step = _step(train[0].shape)
            kind, self._prepare = "LogisticRegression", partial(_pooled, step=step)
            method = _METHODS[kind].format(f", means of {step} x {step}" if step > 1 else "")
            train, validation = (self._prepare(train[0]), train[1]), (self._prepare(validation[0]), validation[1])
        else:
            kind = "LinearSVC" if len(train[1]) <= _MOST_EXACT else "SGDClassifier"
            method = _METHODS[kind]
        both = method.replace(" and training", ", training").replace("training split", "training and validation split")
        self._classifiers = {
            "linear": (method, _start(kind, train, classes, workers)),
            "linear_all": (both, _start(kind, _concatenate(train, validation), classes, workers)),
        }

    def scores(self, test: Split) -> dict[str, Any]:
        """Return the scores {"majority", "linear", "linear_all"}; the first always predicts the largest class."""
        scores: dict[str, Any] = {"majority": majority(self._train_y, test[1], self.classes)}
        x = self._prepare(test[0])
        step = max(1, _MOST_DECISIONS // (self.classes if self.classes > 2 else 1))
        for name, (method, result) in self._classifiers.items():
            if isinstance(result, str):
                scores[name] = {"method": method, LEFT_OUT: result}
                continue
            classifier = result()
            parts = [classifier.predict(x[start : start + step]) for start in range(0, len(test[1]), step)]
            scores[name] = {"method": method, **metrics.classification(test[1], np.concatenate(parts), self.classes)}
        return scores


def classification(train: Split, validation: Split, test: Split, classes: int) -> dict[str, Any]:
    """Return `Linear.scores` of the test split."""
    return Linear(train, validation, classes).scores(test)


def _start(kind: str, split: Split, classes: int, workers: Workers | None) -> Callable[[], Any] | str:
    """Start to fit a classifier; return a function that waits for it, or the reason why it is left out."""
    x, y = split
    problems = classes if classes > 2 else 1
    need = _COPIES * problems * x.shape[1] * 8
    free = memory_limit.free()
    most = _MOST_BYTES if free is None else min(_MOST_BYTES, free // 2)
    if need > most:
        coefficients = f"its coefficients, {problems:,} x {x.shape[1]:,} in float64"
        return f"{coefficients}, take {out_of_memory.size(need)} in all, expected at most {out_of_memory.size(most)}"
    values = x.shape[0] + (x.size if isinstance(x, np.ndarray) else x.nnz)
    seconds = _SECONDS[kind] * problems * values
    if seconds > _MOST_SECONDS:
        work = f"its {values:,} values for each of {problems:,} classes"
        return f"{work} take about {seconds / 60:.0f} minutes, expected at most {_MOST_SECONDS / 60:.0f}"
    if workers is None:
        return lambda: _fit(_estimator(kind), x, y)
    return partial(_wait, kind, split, workers.submit(learn, _message(kind, x, y)))


def _wait(kind: str, split: Split, result: Callable[[], Message]) -> Any:
    """Return the classifier that a process has fitted; fit it here if the processes have ended."""
    try:
        message = result()
    except WorkerError:
        return _fit(_estimator(kind), *split)
    arrays = zip(message.values["arrays"], message.buffers, strict=True)
    return _LinearClassifier(*(np.frombuffer(raw, dtype).reshape(shape) for (dtype, shape), raw in arrays))


@dataclass(frozen=True)
class _LinearClassifier:
    """A classifier with coefficients [problems, features], intercepts and classes, which predicts as scikit-learn's
    does without its import, which takes a second."""

    coef: np.ndarray
    intercept: np.ndarray
    classes: np.ndarray

    def predict(self, x: Any) -> np.ndarray:
        scores = np.asarray(x @ self.coef.T) + self.intercept
        is_binary = scores.shape[1] == 1
        indices: np.ndarray = (scores[:, 0] > 0).astype(np.int64) if is_binary else scores.argmax(axis=1)
        return self.classes[indices]


def _message(kind: str, x: Any, y: np.ndarray) -> Message:
    """Return the message for `learn`."""
    parts = [x] if isinstance(x, np.ndarray) else [x.data, x.indices, x.indptr]
    arrays = [np.ascontiguousarray(part) for part in (*parts, y)]
    values = {
        "kind": kind,
        "shape": list(x.shape),
        "types": [array.dtype.str for array in arrays],
        "threads": _threads(),
    }
    return Message(values, arrays)


def learn(message: Message) -> Message:
    """Fit a classifier, as a process's job."""
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

    values = message.values
    # Copies, as scikit-learn may write to its inputs.
    *parts, y = (np.frombuffer(raw, dtype).copy() for raw, dtype in zip(message.buffers, values["types"], strict=True))
    shape = tuple(values["shape"])
    x = parts[0].reshape(shape) if len(parts) == 1 else csr_matrix(tuple(parts), shape, copy=False)
    with threadpool_limits(values["threads"]):
        classifier = _fit(_estimator(values["kind"]), x, y)
    arrays = [np.ascontiguousarray(getattr(classifier, name)) for name in _PARAMETERS]
    return Message({"arrays": [(array.dtype.str, array.shape) for array in arrays]}, arrays)


def _threads() -> int:
    """Return the number of BLAS threads of this process, on which the last bits of results depend."""
    from threadpoolctl import threadpool_info

    return max((library["num_threads"] for library in threadpool_info()), default=1)


def _estimator(kind: str) -> Any:
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.svm import LinearSVC

    if kind == "LogisticRegression":
        return LogisticRegression(C=1.0, max_iter=100)
    if kind == "LinearSVC":
        return LinearSVC(C=1.0, random_state=0)
    # The number of threads does not change the result: each fits some of the classes.
    return SGDClassifier(alpha=1e-4, random_state=0, n_jobs=available())


def majority(train_y: np.ndarray, test_y: np.ndarray, classes: int) -> dict[str, float]:
    """Return the scores of always predicting the most frequent training label."""
    constant = np.full(len(test_y), np.bincount(train_y, minlength=classes).argmax())
    return metrics.classification(test_y, constant, classes)


def regression(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, mean: float, scale: float
) -> dict[str, Any]:
    """Return scores {"mean", "ridge", "mlp"} in the target's units; y are standardized with `mean` and `scale`."""
    from sklearn.linear_model import RidgeCV
    from sklearn.neural_network import MLPRegressor

    ridge = RidgeCV(alphas=np.logspace(-3, 3, 25)).fit(train_x, train_y)
    early_stopping = len(train_y) >= 20  # its validation split is a tenth of the rows
    mlp = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=early_stopping, max_iter=500, random_state=0)
    mlp = _fit(mlp, train_x, train_y)
    truth = test_y.astype(np.float64) * scale + mean

    def scores(predicted: np.ndarray) -> dict[str, float]:
        return metrics.regression(truth, predicted * scale + mean)

    return {
        "mean": scores(np.full(len(test_y), float(train_y.mean()))),
        "ridge": {"method": f"RidgeCV, alpha {ridge.alpha_:.3g}", **scores(ridge.predict(test_x))},
        "mlp": {"method": "MLPRegressor(64, 64), early stopping", **scores(mlp.predict(test_x))},
    }


def _step(shape: tuple[int, ...]) -> int:
    """Return the side of the blocks whose means reduce a picture to at most _MOST_PIXELS values."""
    _, height, width, channels = shape
    step = 1
    while -(-height // step) * -(-width // step) * channels > _MOST_PIXELS:
        step += 1
    return step


def _pooled(pictures: Pictures, step: int) -> np.ndarray:
    """Return float32 [N, values] from 0 to 1, means of blocks of step x step pixels, smaller at the edges."""
    count, height, width, channels = pictures.shape
    rows, columns = np.arange(0, height, step), np.arange(0, width, step)
    heights = np.diff(np.append(rows, height)).astype(np.float32).reshape(1, -1, 1, 1)
    widths = np.diff(np.append(columns, width)).astype(np.float32).reshape(1, 1, -1, 1)
    blocks = np.empty((count, len(rows), len(columns), channels), dtype=np.float32)
    # Small batches stay in the cache, and rows are added as integers: 20 us per picture of 64 x 64 colour pixels
    # instead of 62 us with all pictures as float32.
    for start in range(0, count, _POOLING_BATCH):
        part = pictures.pixels[start : start + _POOLING_BATCH]
        sums = np.empty((len(part), len(rows), width, channels), dtype=np.uint32)
        for index, row in enumerate(rows):
            part[:, row : row + step].sum(axis=1, dtype=np.uint32, out=sums[:, index])
        means = sums.astype(np.float32) / heights
        np.divide(np.add.reduceat(means, columns, axis=2), widths, out=blocks[start : start + _POOLING_BATCH])
    blocks /= np.float32(255)
    return blocks.reshape(count, -1)


def _concatenate(first: Split, second: Split) -> Split:
    from scipy import sparse

    stack = sparse.vstack if sparse.issparse(first[0]) else np.concatenate
    return stack([first[0], second[0]]), np.concatenate([first[1], second[1]])


def _fit(estimator: Any, x: Any, y: np.ndarray) -> Any:
    """Fit an estimator and return it, also if it has not converged.

    Raises KeyboardInterrupt, for which scikit-learn's networks only warn and return early.
    """
    from sklearn.exceptions import ConvergenceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        warnings.filterwarnings("ignore", message="The number of unique classes")
        warnings.filterwarnings("error", message=_INTERRUPTED)
        try:
            return estimator.fit(x, y)
        except UserWarning as warning:
            if str(warning).startswith(_INTERRUPTED):
                raise KeyboardInterrupt from None
            raise
