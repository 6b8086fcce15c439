"""`minidl explain`: how much each term of a text raised or lowered the score of a label.

`terms` computes the values; together with the rest, which is always included, they add up to the logit.
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

_BAR = 24  # characters of the longest bar


class Explanation(NamedTuple):
    """The terms of a text for a label as (term, value), from the highest value to the lowest, and the rest."""

    label: str
    probability: float
    logit: float
    rest: float
    terms: list[tuple[str, float]]


def explain(config: Explain) -> Iterator[tuple[str, list[Explanation]]]:
    """Yield each text with the explanations of its `config.top` most probable labels.

    Raises ConfigError for a run of another kind, DamagedError for missing or invalid files.
    """
    run = RunFolder(config.run).read_finished()
    if not run.task.has_terms:
        raise ConfigError(f"{config.run} is {run.task.run}: explain requires a text run")
    if run.config["model"] != "mlp":
        raise ConfigError(f"{config.run} has --model {run.config['model']}: explain requires --model mlp")
    classifier = load(config.run)
    chunks = [config.texts] if config.texts else inputs.lines_as_they_come(inputs.standard_input())
    for chunk in chunks:
        for line in chunk:
            text = line if isinstance(line, str) else line[1]
            yield text, explain_text(classifier, text, config.top)


def explain_text(classifier: Any, text: str, top: int) -> list[Explanation]:
    """Return the explanations of the `top` most probable labels of a text."""
    features = classifier.features([text])
    names = _names(classifier.vectorizer, text)
    hidden, y = logits(classifier.model, features)
    shares = probabilities(y.data.float().cpu().numpy())[0]
    explanations = []
    for index in np.argsort(-y.data.double().cpu().numpy()[0], kind="stable")[:top]:
        weights = values(classifier.model, features, (hidden, y), np.array([index]))
        terms = [(names[features.indices[i]], float(weights[i])) for i in np.argsort(-weights, kind="stable")]
        logit = float(y.data[0, int(index)])
        rest = logit - float(weights.sum())
        explanations.append(Explanation(classifier.targets.labels[index], float(shares[index]), logit, rest, terms))
    return explanations


def _names(vectorizer: Any, text: str) -> dict[int, str]:
    """Return the terms of a text by column; terms with the same hash share a name."""
    terms = count_texts([text], vectorizer.analyzer).terms
    ones = np.ones(len(terms), dtype=np.int32)
    weighted = vectorizer.weighted(Counted(terms, ones, np.arange(len(terms), dtype=np.int32), ones.astype(np.uint16)))
    names: dict[int, str] = {}
    for row, column in zip(*weighted.nonzero(), strict=True):
        names[int(column)] = f"{names[int(column)]} / {terms[row]}" if int(column) in names else terms[row]
    return names


def as_text(text: str, explanations: Sequence[Explanation], most: int) -> str:
    """Return each explanation with bars: the `most` terms of the largest absolute values, in their order."""
    lines = [shorten(text)]
    for each in explanations:
        largest = sorted(each.terms, key=lambda term: -abs(term[1]))[:most]
        terms = [(one_line(name), value) for name, value in each.terms if (name, value) in largest]
        others = sum(value for _, value in each.terms) - sum(value for _, value in terms)
        rows = [*terms, *([("other terms", others)] if len(terms) < len(each.terms) else []), ("rest", each.rest)]
        longest = max((abs(value) for _, value in rows), default=0.0) or 1.0
        width = max(len(name) for name, _ in rows)
        lines.append(f"  {one_line(each.label)}: probability {each.probability:.3f}, logit {each.logit:.3f}")
        for name, value in rows:
            bar = ("+" if value > 0 else "-") * round(_BAR * abs(value) / longest)
            lines.append(f"    {name.ljust(width)}  {value:8.3f}  {bar}".rstrip())
    return "\n".join(lines) + "\n"


def as_json(text: str, explanations: Sequence[Explanation]) -> dict[str, Any]:
    """Return the explanations as a JSON object, with all terms."""
    labels = [
        {**each._asdict(), "terms": [{"term": term, "value": value} for term, value in each.terms]}
        for each in explanations
    ]
    return {"text": text, "labels": labels}
