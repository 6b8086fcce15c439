"""The predictions of a finished text run."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minidl import data
from minidl.data import DataError, TextDataset
from minidl.data.parsing import listed
from minidl.data.workers import Workers
from minidl.errors import ConfigError
from minidl.training.prediction import inputs
from minidl.training.settings.command import Evaluate, Predict
from minidl.training.task import Predictor
from minidl.training.tasks.text_settings import TrainText

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from minidl import nn
    from minidl.data import Texts
    from minidl.data.corpus import Corpus, CorpusDataset
    from minidl.data.hashing import HashedTfidf
    from minidl.data.terms import Counted
    from minidl.data.vectorizer import Tfidf
    from minidl.training.loop.targets import Classification


@dataclass(frozen=True)
class TextClassifier(Predictor[TrainText]):
    """The model of a text run with the vectorizer that turns texts into its inputs."""

    vectorizer: Tfidf | HashedTfidf
    argument = "a text"

    @cached_property
    def targets(self) -> Classification:
        from minidl.training.loop.targets import Classification

        return replace(Classification.of_run(self.run), reject=self.reject)

    @cached_property
    def model(self) -> nn.Module:
        from minidl import models
        from minidl.training.loop.supervised import saved_perceptron
        from minidl.training.run_folder import weights

        if self.config.model == "attention":
            model = make_model(self.config, len(self.vectorizer), self.targets.outputs, "meta")
            return weights.materialize(model, self.run.weights(), self.run.model)
        make = functools.partial(models.TextMLP, act=self.config.activation)
        return saved_perceptron(self.run, self.config, make, len(self.vectorizer), self.targets.outputs)

    def chunks(self, config: Predict) -> Iterable[list[str] | Counted]:
        if config.inputs:
            return [list(config.inputs)]
        if config.file is not None:
            return self._read_file(config.file, config.text_column)
        return ([line for _, line in chunk] for chunk in inputs.lines_as_they_come(inputs.standard_input()))

    def _read_file(self, file: Path, text_column: str | None) -> Iterator[list[str] | Counted]:
        from minidl.data.corpus import read_counted

        columns = text_column, self.config.text_column
        counted = read_counted(file, self.vectorizer.analyzer, *columns, self.workers)
        if counted is None:
            yield from inputs.chunks(data.read_texts(file, *columns), inputs.FILE_CHUNK)
            return
        yield from counted.parts(inputs.FILE_CHUNK)

    def features(self, texts: list[str] | Counted) -> Any:
        return _features(self.vectorizer, texts, self.workers)

    def answers(self, texts: list[str] | Counted, features: Any, top: int) -> list[dict[str, Any]]:
        """Return an answer per text: label, probability, the `top` best labels and the number of known terms."""
        answers, counts = self.targets.answers(self.outputs(features), top), self.known_terms(features).tolist()
        return [{**answer, "known_terms": count} for answer, count in zip(answers, counts, strict=True)]

    def lines(self, texts: list[str] | Counted, features: Any, top: int) -> Iterable[str]:
        return self.targets.lines(self.outputs(features), top, self.known_terms(features), self.workers)

    def known_terms(self, features: Any) -> np.ndarray:
        """Return the number of different known terms of each text, int64 [N]."""
        import numpy as np

        if isinstance(features, np.ndarray):
            ordered = np.sort(features, axis=1)
            return ((ordered > 1) & (np.diff(ordered, axis=1, prepend=0) > 0)).sum(axis=1)
        return np.diff(features.indptr).astype(np.int64)

    def check_columns(self, config: Evaluate) -> None:
        name = self.config.data if config.data is None else config.data
        if (config.text_column or config.label_column) and (config.data is None or name in data.TEXT_DATA):
            raise ConfigError(f"--text-column and --label-column are for a file given by --data, not for {name}")

    def labelled(self, config: Evaluate) -> tuple[Any, np.ndarray, dict[str, Any]]:
        from minidl.data.corpus import read_corpus

        assert config.data is not None
        corpus = read_corpus(
            config.data, self.vectorizer.analyzer, self.targets.labels,
            text_column=config.text_column or self.config.text_column,
            label_column=config.label_column or self.config.label_column,
        )  # fmt: skip
        return *examples(self.vectorizer, corpus), corpus.source

    def test(self, dataset: TextDataset | CorpusDataset, config: Evaluate) -> tuple[Any, np.ndarray]:
        import numpy as np

        labels = self.targets.labels
        index = {label: i for i, label in enumerate(labels)}
        unknown = [label for label in dataset.labels if label not in index]
        if unknown:
            raise DataError(
                f"{dataset.name} has labels that the model does not know: {listed(unknown)}; its labels are: "
                f"{listed(labels)}"
            )
        features, classes = examples(self.vectorizer, dataset.test)
        return features, np.array([index[label] for label in dataset.labels], dtype=np.int64)[classes]


def examples(vectorizer: Tfidf | HashedTfidf, part: Texts | Corpus) -> tuple[Any, np.ndarray]:
    """Return (scipy CSR, or int32 [N, L] of terms in order; class indices int64 [N])."""
    import numpy as np

    if isinstance(part, data.Texts):
        return _features(vectorizer, part.texts), np.asarray(part.labels, dtype=np.int64)
    return _features(vectorizer, part.content), part.classes


def _features(vectorizer: Tfidf | HashedTfidf, texts: list[str] | Counted, workers: Workers | None = None) -> Any:
    return vectorizer.transform(texts, workers) if isinstance(texts, list) else vectorizer.weighted(texts)


def make_model(config: TrainText, terms: int, classes: int, device: str | None) -> nn.Module:
    """Return the network of the settings."""
    from minidl import models
    from minidl.data.vectorizer import InOrder

    if config.model == "mlp":
        return models.TextMLP(terms, classes, config.hidden, config.dropout, device=device, act=config.activation)
    width, heads = config.hidden[0], math.gcd(2, config.hidden[0])
    return models.TextAttention(terms + 2, classes, width, heads, InOrder.LENGTH, dropout=config.dropout, device=device)
