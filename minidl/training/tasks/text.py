"""`minidl train text`: TF-IDF features and a perceptron with a sparse first layer, or terms in order and attention."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidl import data
from minidl.data import TextDataset
from minidl.data.digests import content_digest
from minidl.data.records import DataError
from minidl.data.workers import Workers, available
from minidl.training.process import helpers, out_of_memory
from minidl.training.settings import fields, text_defaults
from minidl.training.settings.command import SPLITS
from minidl.training.task import Task, only_for_files
from minidl.training.tasks.text_answers import TextClassifier, examples, make_model
from minidl.training.tasks.text_settings import TrainText

if TYPE_CHECKING:
    import numpy as np

    from minidl.data.corpus import CorpusDataset
    from minidl.data.hashing import HashedTfidf
    from minidl.data.vectorizer import Tfidf, TfidfOptions
    from minidl.training.loop.supervised import Supervised
    from minidl.training.run_folder.manifest import RunFiles

_MOST_TEXTS = 200_000  # larger files are not read again for the texts of mistakes


class TextTask(Task[TrainText]):
    """The task of classifying texts."""

    name = "text"
    run = "a text run"
    settings = TrainText
    data_sets = data.TEXT_DATA
    has_terms = True
    files = ("labels.json", "calibration.json", "vocabulary.json", "hashing.json", "confusion.png", "reliability.png")

    def read(self, name: str, **options: Any) -> TextDataset:
        return data.load_text(name, **options)

    def options(self, config: TrainText) -> dict[str, Any]:
        columns = {"text_column": config.text_column, "label_column": config.label_column}
        if config.data not in data.TEXT_DATA:
            return {**columns, **config.splits}
        only_for_files(
            config.data, {**columns, **config.model_dump(include=SPLITS)}, "its columns and splits are fixed"
        )
        return {} if config.data == "docstrings" else {"progress": not config.quiet}

    def load(self, config: TrainText) -> CorpusDataset:
        """Return the data set as term counts; texts of the user's own file are counted while they are read."""
        from minidl.data.corpus import count_dataset, load_corpus

        analyzer, options = None if config.model == "attention" else make_tfidf(config).analyzer, self.options(config)
        helpers.in_thread(lambda: importlib.import_module("scipy.sparse"))  # takes 0.2 s; the split needs it first
        with out_of_memory.used_for("the data", "less data"), Workers(config.workers or available()) as workers:
            if config.data == "docstrings":
                options["workers"] = workers
            if config.data in data.TEXT_DATA:
                return count_dataset(self.read(config.data, **options), analyzer, workers)
            data.check_text_file(config.data)
            options = {name: value for name, value in options.items() if value is not None}
            return load_corpus(config.data, analyzer, workers, **options)

    def settled(self, config: TrainText, dataset: CorpusDataset) -> TrainText:
        """Return the settings with defaults that suit the number of texts."""
        defaults = text_defaults.of_settings(config, len(dataset.train), len(dataset.labels))
        missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
        return TrainText(**{**dict(config), **missing}) if missing else config

    def fingerprints(self, dataset: CorpusDataset) -> Iterator[str]:
        """Yield the fingerprint of the digests of the texts, then that of the texts."""
        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        for part in (dataset.train, dataset.validation, dataset.test):
            digest.update(f"{len(part)}\n".encode() + part.classes.tobytes() + part.digests.tobytes())
        yield digest.hexdigest()
        digest = hashlib.sha256(json.dumps(dataset.labels).encode())
        texts = dataset.texts()
        for split in (texts.train, texts.validation, texts.test):
            digest.update(f"{len(split)}\n".encode())
            for text, label in zip(split.texts, split.labels, strict=True):
                raw = text.encode()
                digest.update(f"{label} {len(raw)}\n".encode() + raw)
        yield digest.hexdigest()

    def prepare(self, config: TrainText, dataset: CorpusDataset) -> Supervised[TrainText]:
        """Return the experiment, with the vocabulary of the training split. Raises DataError if that is empty."""
        from minidl.data.vectorizer import InOrder, Tfidf
        from minidl.training.loop.supervised import Supervised, sizes
        from minidl.training.loop.targets import Classification

        kind, document = _vectorizer(config)
        train, validation, test = dataset.train, dataset.validation, dataset.test
        attention = config.model == "attention"
        vectorizer = (kind.fit if attention else kind.of_counts)(train.content, make_tfidf(config))
        tfidf = Tfidf(vectorizer.options, vectorizer.terms, vectorizer.idf) if isinstance(vectorizer, InOrder) else None
        count, classes = len(vectorizer), len(dataset.labels)
        targets = Classification(dataset.labels)
        return Supervised(
            name=self.name,
            config=config,
            source={**dataset.source, "sizes": sizes(dataset), "features": count, "classes": classes},
            features=f"{count:,} {'hashed ' if config.features == 'hash' else ''}features",
            targets=targets,
            train=examples(vectorizer, train),
            validation=examples(vectorizer, validation),
            test=lambda: examples(vectorizer, test),
            make_model=lambda config, device: make_model(config, count, classes, device),
            network=config.model if attention else None,
            documents={**targets.documents, document: vectorizer.to_json()},
            terms=None if attention else getattr(vectorizer, "terms", None),
            texts=functools.partial(_test_texts, config, dataset),
            linear=None
            if tfidf is None
            else (examples(tfidf, train), examples(tfidf, validation), lambda: examples(tfidf, test)),
        )

    def predictor(self, config: TrainText, run: RunFiles) -> TextClassifier:
        kind, document = _vectorizer(config)
        vectorizer = kind.from_json(run.text(document), str(config.out / document))
        vectorizer.transform([""])  # import scikit-learn before the inputs fill the memory
        return TextClassifier(config, run, vectorizer)


def make_tfidf(config: TrainText) -> TfidfOptions:
    """Return the options of the vectorizer."""
    from minidl.data.vectorizer import TOKEN_PATTERN, TfidfOptions

    least, most = fields.ngram_range(config.ngrams)
    return TfidfOptions(
        ngram_min=least, ngram_max=most, min_df=config.min_df, max_features=config.max_features, nfc=config.nfc,
        unit=config.analyzer or "word",
        token_pattern=TOKEN_PATTERN if config.token_pattern is None else config.token_pattern,
    )  # fmt: skip


def _test_texts(config: TrainText, dataset: CorpusDataset, rows: np.ndarray) -> list[str]:
    """Return these texts of the test split; none if their file is large, cannot be read again, or has changed."""
    files = [] if config.data in data.TEXT_DATA else filter(None, (config.data, config.validation, config.test))
    splits = dataset.train, dataset.validation, dataset.test
    if sum(map(len, splits)) > _MOST_TEXTS or not all(Path(name).is_file() for name in files):
        return []
    try:
        texts = dataset.texts().test.texts
    except (DataError, OSError):
        return []
    selection = [texts[row] for row in rows if row < len(texts)]
    digests = [dataset.test.digests[row].tobytes() for row in rows]
    return selection if list(map(content_digest, selection)) == digests else []


def _vectorizer(config: TrainText) -> tuple[type[Tfidf | HashedTfidf], str]:
    """Return the vectorizer's class, and the name of its document in a run."""
    if config.features == "hash":
        from minidl.data.hashing import HashedTfidf

        return HashedTfidf, "hashing.json"
    from minidl.data.vectorizer import InOrder, Tfidf

    return InOrder if config.model == "attention" else Tfidf, "vocabulary.json"
