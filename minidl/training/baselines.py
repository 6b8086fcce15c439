"""What simple methods reach on the same features, by scikit-learn: a score means little without them.

The baselines learn from the training split, the examples that the network learns from.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from minidl.training import metrics

LINEAR = "LinearSVC(C=1), same features and training split"


def classification(train_x: Any, train_y: np.ndarray, test_x: Any, test_y: np.ndarray, classes: int) -> dict[str, Any]:
    """{"majority", "linear"}: always the largest class, and a linear support vector machine with C = 1.

    x are scipy CSR matrices or arrays [N, F], y whole numbers [N].
    """
    majority = np.full(len(test_y), np.bincount(train_y, minlength=classes).argmax())
    return {
        "majority": metrics.classification(test_y, majority, classes),
        "linear": {"method": LINEAR, **metrics.classification(test_y, _svm(train_x, train_y, test_x), classes)},
    }


def regression(
    train_x: np.ndarray, train_y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray, mean: float, scale: float
) -> dict[str, Any]:
    """{"mean", "ridge", "mlp"}; y are standardised with `mean` and `scale`, scores are in the target's units."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import RidgeCV
    from sklearn.neural_network import MLPRegressor

    ridge = RidgeCV(alphas=np.logspace(-3, 3, 25)).fit(train_x, train_y)
    enough = len(train_y) >= 20  # it takes a tenth of the rows as its own validation split
    mlp = MLPRegressor(hidden_layer_sizes=(64, 64), early_stopping=enough, max_iter=500, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        mlp.fit(train_x, train_y)
    truth = test_y.astype(np.float64) * scale + mean

    def scores(predicted: np.ndarray) -> dict[str, float]:
        return metrics.regression(truth, predicted * scale + mean)

    return {
        "mean": scores(np.full(len(test_y), float(train_y.mean()))),
        "ridge": {"method": f"RidgeCV, alpha {ridge.alpha_:.3g}", **scores(ridge.predict(test_x))},
        "mlp": {"method": "MLPRegressor(64, 64), early stopping", **scores(mlp.predict(test_x))},
    }


def _svm(train_x: Any, train_y: np.ndarray, test_x: Any) -> np.ndarray:
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import LinearSVC

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return LinearSVC(C=1.0, random_state=0).fit(train_x, train_y).predict(test_x)
