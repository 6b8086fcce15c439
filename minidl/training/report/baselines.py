"""What simple methods reach on the same features, by scikit-learn: a score means little without them.

The baselines learn from the training split, the examples that the network learns from. A network spends the validation
split on early stopping; a linear machine with a fixed C needs none, so its score with both splits stands beside.
While a GPU trains the network, linear machines learn in processes.
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
LEFT_OUT = "left_out"  # in the place of a baseline's scores: why there are none
# Seconds for a value of an example and a class, over all iterations: 4 to 13e-8 were measured for the support vector
# machine, 1 to 3e-8 for the logistic regression, 6e-8 for stochastic gradients. The first may take 1e-6 where classes
# overlap: 14 s for 42,001 texts of eight classes, and stochastic gradients 0.8 s for the same accuracy.
_SECONDS = {"LinearSVC": 1e-7, "LogisticRegression": 2e-8, "SGDClassifier": 6e-8}
_MOST_SECONDS = 200.0
_MOST_BYTES = 2**31
_COPIES = 3  # of the coefficients: the library's, its caller's and a transposed one
_MOST_DECIDED = 2**24  # values of the test split's decision function at a time
_MOST_PIXELS = 1024  # values of a picture that the logistic regression gets
_SHRUNK = 32  # pictures
_MOST_EXACT = 20_000  # examples that the exact solver of the support vector machine gets
_LEARNT = ("coef_", "intercept_", "classes_")

Split = tuple[Any, np.ndarray]  # features (scipy CSR, array [N, F] or Pictures) and targets [N]

_INTERRUPTED = "Training interrupted by user"


class Linear:
    """Linear machines on a classification; they begin to learn at once where `workers` has processes for them.

    A support vector machine with C = 1, and the same with the validation split as further training examples: by
    LinearSVC up to 20,000 examples, by stochastic gradients above. On pictures they are logistic regressions.
    """

    def __init__(self, train: Split, validation: Split, classes: int, workers: Workers | None = None) -> None:
        self.classes, self._train_y = classes, train[1]
        self._prepare: Callable[[Any], Any] = lambda x: x
        if isinstance(train[0], Pictures):
            # A support vector machine takes minutes on 60,000 pictures.
            step = _step(train[0].shape)
            kind, self._prepare = "LogisticRegression", partial(_flat, step=step)
            method = _METHODS[kind].format(f", means of {step} x {step}" if step > 1 else "")
            train, validation = (self._prepare(train[0]), train[1]), (self._prepare(validation[0]), validation[1])
        else:
            kind = "LinearSVC" if len(train[1]) <= _MOST_EXACT else "SGDClassifier"
            method = _METHODS[kind]
        both = method.replace(" and training", ", training").replace("training split", "training and validation split")
        self._machines = {
            "linear": (method, _begun(kind, train, classes, workers)),
            "linear_all": (both, _begun(kind, _joined(train, validation), classes, workers)),
        }

    def scores(self, test: Split) -> dict[str, Any]:
        """{"majority", "linear", "linear_all"}: of always answering the largest class, and of the machines."""
        scores: dict[str, Any] = {"majority": majority(self._train_y, test[1], self.classes)}
        x = self._prepare(test[0])
        step = max(1, _MOST_DECIDED // (self.classes if self.classes > 2 else 1))
        for name, (method, machine_) in self._machines.items():
            if isinstance(machine_, str):
                scores[name] = {"method": method, LEFT_OUT: machine_}
                continue
            learnt = machine_()
            parts = [learnt.predict(x[start : start + step]) for start in range(0, len(test[1]), step)]
            scores[name] = {"method": method, **metrics.classification(test[1], np.concatenate(parts), self.classes)}
        return scores


def classification(train: Split, validation: Split, test: Split, classes: int) -> dict[str, Any]:
    """`Linear.scores` of the test split."""
    return Linear(train, validation, classes).scores(test)


def _begun(kind: str, part: Split, classes: int, workers: Workers | None) -> Callable[[], Any] | str:
    """A linear machine that learns, as a function that waits for it; or why there is none."""
    x, y = part
    problems = classes if classes > 2 else 1
    need = _COPIES * problems * x.shape[1] * 8
    free = memory_limit.free()
    most = _MOST_BYTES if free is None else min(_MOST_BYTES, free // 2)
    if need > most:
        what = f"its coefficients, {problems:,} x {x.shape[1]:,} in float64"
        return f"{what}, take {out_of_memory.size(need)} in all, expected at most {out_of_memory.size(most)}"
    values = x.shape[0] + (x.size if isinstance(x, np.ndarray) else x.nnz)
    seconds = _SECONDS[kind] * problems * values
    if seconds > _MOST_SECONDS:
        what = f"its {values:,} values for each of {problems:,} classes"
        return f"{what} take about {seconds / 60:.0f} minutes, expected at most {_MOST_SECONDS / 60:.0f}"
    if workers is None:
        return lambda: _fitted(_machine(kind), x, y)
    return partial(_learnt, kind, part, workers.later(learn, _message(kind, x, y)))


def _learnt(kind: str, part: Split, result: Callable[[], Message]) -> Any:
    try:
        found = result()
    except WorkerError:  # the processes are gone, and the network need not be lost with them
        return _fitted(_machine(kind), *part)
    arrays = zip(found.values["arrays"], found.buffers, strict=True)
    return _Learnt(*(np.frombuffer(raw, dtype).reshape(shape) for (dtype, shape), raw in arrays))


@dataclass(frozen=True)
class _Learnt:
    """A linear machine by its coefficients [problems, features], intercepts and classes, as scikit-learn's predict:
    importing that takes a second."""

    coef: np.ndarray
    intercept: np.ndarray
    classes: np.ndarray

    def predict(self, x: Any) -> np.ndarray:
        scores = np.asarray(x @ self.coef.T) + self.intercept
        found: np.ndarray = self.classes[
            (scores[:, 0] > 0).astype(np.int64) if scores.shape[1] == 1 else scores.argmax(axis=1)
        ]
        return found


def _message(kind: str, x: Any, y: np.ndarray) -> Message:
    """What `learn` takes."""
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
    """In a process of its own: a machine learns."""
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

    values = message.values
    # Copies, as scikit-learn may write to what it gets.
    *parts, y = (np.frombuffer(raw, dtype).copy() for raw, dtype in zip(message.buffers, values["types"], strict=True))
    shape = tuple(values["shape"])
    x = parts[0].reshape(shape) if len(parts) == 1 else csr_matrix(tuple(parts), shape, copy=False)
    with threadpool_limits(values["threads"]):
        learnt = _fitted(_machine(values["kind"]), x, y)
    arrays = [np.ascontiguousarray(getattr(learnt, name)) for name in _LEARNT]
    return Message({"arrays": [(array.dtype.str, array.shape) for array in arrays]}, arrays)


def _threads() -> int:
    """Those of BLAS in this process, on which last bits depend."""
    from threadpoolctl import threadpool_info

    return max((library["num_threads"] for library in threadpool_info()), default=1)


def _machine(kind: str) -> Any:
    from sklearn.linear_model import LogisticRegression, SGDClassifier
    from sklearn.svm import LinearSVC

    if kind == "LogisticRegression":
        return LogisticRegression(C=1.0, max_iter=100)
    if kind == "LinearSVC":
        return LinearSVC(C=1.0, random_state=0)
    # Its classes are learnt in threads, each as it would be alone.
    return SGDClassifier(alpha=1e-4, random_state=0, n_jobs=available())


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
    count, height, width, channels = pictures.shape
    rows, columns = np.arange(0, height, step), np.arange(0, width, step)
    tall = np.diff(np.append(rows, height)).astype(np.float32).reshape(1, -1, 1, 1)
    wide = np.diff(np.append(columns, width)).astype(np.float32).reshape(1, 1, -1, 1)
    found = np.empty((count, len(rows), len(columns), channels), dtype=np.float32)
    # Some pictures at a time, which stay in the cache, and rows in whole numbers: 20 us for each of 64 x 64 colour
    # pixels, which were 62 when all became float32 at once.
    for start in range(0, count, _SHRUNK):
        part = pictures.pixels[start : start + _SHRUNK]
        sums = np.empty((len(part), len(rows), width, channels), dtype=np.uint32)
        for place, row in enumerate(rows):
            part[:, row : row + step].sum(axis=1, dtype=np.uint32, out=sums[:, place])
        means = sums.astype(np.float32) / tall
        np.divide(np.add.reduceat(means, columns, axis=2), wide, out=found[start : start + _SHRUNK])
    found /= np.float32(255)
    return found.reshape(count, -1)


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
