"""`minidl train text` as a classifier of scikit-learn, for pipelines, cross-validation and grid searches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from minidl import nn, random
from minidl.data.vectorizer import Tfidf
from minidl.training.loop.forward import outputs
from minidl.training.loop.supervised import Supervised
from minidl.training.loop.targets import Classification, probabilities
from minidl.training.process.display import Display
from minidl.training.report import calibration
from minidl.training.settings import text_defaults
from minidl.training.tasks.text import make_tfidf
from minidl.training.tasks.text_answers import make_model
from minidl.training.tasks.text_settings import TrainText

__all__ = ["TextClassifier"]


class TextClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """TF-IDF features and a multilayer perceptron, with the defaults of `minidl train text`.

    X is a sequence of N texts (str), y their N labels. Parameters that are None follow from the number of texts; the
    others are options of the command. `validation_fraction` of the texts choose the epoch. verbose=1 prints a line an
    epoch. After fit: `classes_` [C], `n_iter_` (epochs), `best_epoch_`, `vectorizer_`, `weights_` (by name) and
    `temperature_` (of the probabilities).
    A fitted classifier is plain data, which pickle and joblib copy. Without a GPU set MINIDL_CPU=compiled.

    Raises TypeError for X that is not a sequence of str, ValueError for labels of one class or another number of them,
    ConfigError (a ValueError) for parameters outside of their range, DataError if no term occurs in `min_df` texts.
    """

    def __init__(
        self, hidden: tuple[int, ...] = (128,), *, activation: str = "relu", analyzer: str | None = None,
        ngrams: int | str = 1, min_df: int = 2, max_features: int = 20_000, token_pattern: str | None = None,
        epochs: int | None = None, batch_size: int | None = None, lr: float | None = None, optimizer: str = "adamw",
        momentum: float = 0.9, dropout: float = 0.5, weight_decay: float = 0.0, label_smoothing: float | None = None,
        balance: float = 0.3, patience: int = 5, validation_fraction: float = 0.1, random_state: Any = None,
        verbose: int = 0,
    ) -> None:  # fmt: skip
        self.hidden, self.activation, self.dropout = hidden, activation, dropout
        self.analyzer, self.ngrams, self.token_pattern = analyzer, ngrams, token_pattern
        self.min_df, self.max_features = min_df, max_features
        self.epochs, self.batch_size, self.patience = epochs, batch_size, patience
        self.lr, self.optimizer, self.momentum, self.weight_decay = lr, optimizer, momentum, weight_decay
        self.label_smoothing, self.balance, self.validation_fraction = label_smoothing, balance, validation_fraction
        self.random_state, self.verbose = random_state, verbose

    def fit(self, X: Iterable[str], y: Any) -> Self:
        """Train on N texts and their labels."""
        texts, labels = _texts(X), column_or_1d(y, warn=True)
        check_classification_targets(labels)
        if len(texts) != len(labels):
            raise ValueError(f"X has {len(texts)} texts and y {len(labels)} labels, expected as many")
        self.classes_, targets = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has labels of {len(self.classes_)} class, expected at least 2 classes")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction!r}, expected a number between 0 and 1")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        train, validation = _split(targets, self.validation_fraction, seed)
        settings = self._settings(len(train), seed)
        vectorizer = Tfidf.fit([texts[i] for i in train], make_tfidf(settings))
        splits = [(vectorizer.transform([texts[i] for i in part]), targets[part]) for part in (train, validation)]
        self.vectorizer_ = vectorizer
        state, torch_state = random.get_state(), torch.get_rng_state()
        try:
            self._train(settings, len(vectorizer), *splits)
        finally:
            random.set_state(state)
            torch.set_rng_state(torch_state)
        return self

    def _settings(self, texts: int, seed: int) -> TrainText:
        values = {
            name: value for name, value in self.get_params().items()
            if value is not None and name not in ("validation_fraction", "random_state", "verbose")
        }  # fmt: skip
        values["hidden"] = [values["hidden"]] if isinstance(values["hidden"], int) else list(values["hidden"])
        return TrainText(
            **{
                **text_defaults.of_settings(self, texts, len(self.classes_)),
                **values,
                "data": "X",
                "out": Path("X"),
                "seed": seed,
            }
        )

    def _train(self, settings: TrainText, terms: int, train: Any, validation: Any) -> None:
        classes = len(self.classes_)
        learner = Supervised(
            "text", settings, {}, "", Classification([str(i) for i in range(classes)]), train, validation,
            test=lambda: validation, make_model=lambda config, device: make_model(config, terms, classes, device),
            documents={},
        ).learner()  # fmt: skip
        highest, display = -math.inf, Display(quiet=not self.verbose)
        assert settings.epochs is not None
        for epoch in range(settings.epochs):
            learner.prepare(epoch)
            for inputs in learner.inputs(learner.batches, epoch, 0):
                learner.step(*inputs)
                learner.schedule.step()
            learner.model.eval()
            judgement = learner.validate()
            self.n_iter_, highest = epoch + 1, max(highest, judgement.score)
            if judgement.score >= highest - judgement.margin:  # as `loop.epochs`: of equals the last is the best
                self.best_epoch_ = epoch + 1
                self.weights_ = {name: t.cpu().numpy().copy() for name, t in learner.model.state_dict().items()}
            display.show(f"epoch {epoch + 1}/{settings.epochs}  validation accuracy {judgement.score:.4f}")
            if settings.patience and epoch + 1 - self.best_epoch_ >= settings.patience:
                break
        self.hidden_ = settings.hidden
        self.__dict__.pop("_model", None)
        features, truth = validation
        self.temperature_ = calibration.temperature(outputs(self._model, features, classes), truth)

    @functools.cached_property
    def _model(self) -> nn.Module:
        settings = self._settings(1, 0).model_copy(update={"hidden": self.hidden_})
        model = make_model(settings, len(self.vectorizer_), len(self.classes_), None)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in self.weights_.items()})
        return model.eval()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_model"}

    def predict_proba(self, X: Iterable[str]) -> np.ndarray:
        """Return the probability of each class of `classes_`, float32 [N, C]."""
        check_is_fitted(self)
        texts = _texts(X)
        if not texts:
            return np.zeros((0, len(self.classes_)), dtype=np.float32)
        parts = outputs(self._model, self.vectorizer_.transform(texts), len(self.classes_))
        return np.concatenate([probabilities(part, self.temperature_) for part in parts])

    def predict(self, X: Iterable[str]) -> np.ndarray:
        """Return the most probable label of each text [N]."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string, tags.input_tags.two_d_array = True, False
        tags.input_tags.one_d_array = True
        tags.non_deterministic = self.random_state is None
        return tags


def _texts(X: Iterable[str]) -> list[str]:
    if isinstance(X, str | bytes):
        raise TypeError(f"X is one text ({type(X).__name__}), expected a sequence of texts")
    texts = [str(text) if isinstance(text, np.str_) else text for text in X]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"X[{i}] is of type {type(text).__name__}, expected a text (str)")
    return texts


def _split(targets: np.ndarray, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for validation, with the classes in proportion if they are large enough."""
    rows, counts = np.arange(len(targets)), np.bincount(targets)
    enough = counts.min() >= 2 and min(share, 1 - share) * len(rows) >= len(counts)
    return tuple(train_test_split(rows, test_size=share, random_state=seed, stratify=targets if enough else None))
