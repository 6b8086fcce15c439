"""`minidl explain`: which terms of a text spoke for and against a label, and how much.

The values are those of `terms`; with the rest, which is always told, they add up to the logit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minidl.common.console import one_line
from minidl.data.parsing import shorten
from minidl.data.terms import Counted, count_texts
from minidl.errors import ConfigError
from minidl.training.loop.targets import probabilities
from minidl.training.prediction import inputs
from minidl.training.prediction.predict import load
from minidl.training.prediction.terms import logits, values
from minidl.training.run_folder.folder import RunFolder
from minidl.training.settings.command import Explain

_BAR = 24  # characters of the longest


class Spoken(NamedTuple):
    """What spoke for a label: (term, value) from the one most in favour to the one most against, and the rest."""

    label: str
    probability: float
    logit: float
    rest: float
    terms: list[tuple[str, float]]


def explain(config: Explain) -> Iterator[tuple[str, list[Spoken]]]:
    """Each text with what spoke for its `config.top` most probable labels.

    Raises ConfigError for a run of another kind, DamagedError for missing or invalid files.
    """
    task = RunFolder(config.run).read_finished().task
    if not task.has_terms:
        raise ConfigError(f"{config.run} is {task.run}: explain requires a text run")
    classifier = load(config.run)
    chunks = [config.texts] if config.texts else inputs.lines_as_they_come(inputs.standard_input())
    for chunk in chunks:
        for given in chunk:
            text = given if isinstance(given, str) else given[1]
            yield text, spoken(classifier, text, config.top)


def spoken(classifier: Any, text: str, top: int) -> list[Spoken]:
    """What spoke for the `top` most probable labels of a text."""
    features = classifier.features([text])
    names = _names(classifier.vectorizer, text)
    of = logits(classifier.model, features)
    y = of[1].data
    shares = probabilities(y.float().cpu().numpy())[0]
    found = []
    for place in np.argsort(-y.double().cpu().numpy()[0], kind="stable")[:top]:
        given = values(classifier.model, features, of, np.array([place]))
        order = np.argsort(-given, kind="stable")
        terms = [(names[features.indices[i]], float(given[i])) for i in order]
        logit = float(y[0, int(place)])
        rest = logit - float(given.sum())
        found.append(Spoken(classifier.targets.labels[place], float(shares[place]), logit, rest, terms))
    return found


def _names(vectorizer: Any, text: str) -> dict[int, str]:
    """The terms of a text by their columns; several that share a hashed one are named together."""
    terms = count_texts([text], vectorizer.analyzer).terms
    each = np.ones(len(terms), dtype=np.int32)
    alone = vectorizer.weighted(Counted(terms, each, np.arange(len(terms), dtype=np.int32), each.astype(np.uint16)))
    names: dict[int, str] = {}
    for row, column in zip(*alone.nonzero(), strict=True):
        names[int(column)] = f"{names[int(column)]} / {terms[row]}" if int(column) in names else terms[row]
    return names


def as_text(text: str, labels: Sequence[Spoken], most: int) -> str:
    """What spoke for each label, with bars: the `most` terms that weigh most, in their order."""
    lines = [shorten(text)]
    for spoke in labels:
        weighty = sorted(spoke.terms, key=lambda term: -abs(term[1]))[:most]
        shown = [(one_line(name), value) for name, value in spoke.terms if (name, value) in weighty]
        others = sum(value for term, value in spoke.terms) - sum(value for _, value in shown)
        rows = [*shown, *([("other terms", others)] if len(shown) < len(spoke.terms) else []), ("rest", spoke.rest)]
        longest = max((abs(value) for _, value in rows), default=0.0) or 1.0
        width = max(len(name) for name, _ in rows)
        lines.append(f"  {one_line(spoke.label)}: probability {spoke.probability:.3f}, logit {spoke.logit:.3f}")
        for name, value in rows:
            bar = ("+" if value > 0 else "-") * round(_BAR * abs(value) / longest)
            lines.append(f"    {name.ljust(width)}  {value:8.3f}  {bar}".rstrip())
    return "\n".join(lines) + "\n"


def as_json(text: str, labels: Sequence[Spoken]) -> dict[str, Any]:
    """The same as an object of JSON, with all terms."""
    return {
        "text": text,
        "labels": [
            {**spoke._asdict(), "terms": [{"term": term, "value": value} for term, value in spoke.terms]}
            for spoke in labels
        ],
    }
