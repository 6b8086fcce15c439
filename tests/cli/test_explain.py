"""`minidl explain`: what the terms give and the rest are the logit; other runs are refused."""

import json

import numpy as np
import pytest

from minidl.autograd import no_grad
from minidl.data.batches import csr_from_scipy
from minidl.training.prediction.predict import load
from tests.cli.conftest import SMALL

TEXT = "the wheat harvest of the year, a tariff"


@pytest.fixture(scope="module", params=["tfidf", "hash"])
def folder(request, command, texts, tmp_path_factory):
    """A run with two hidden layers; of few hashed columns, which terms have to share."""
    out = tmp_path_factory.mktemp("explained") / request.param
    more = ("--features", "hash", "--max-features", "64") if request.param == "hash" else ()
    done = command("train", "text", "--data", texts, "--out", out, *SMALL, "--hidden", "8,8", *more, "--quiet")
    assert done.code == 0, done.err
    return out


def explained(command, folder, *more, text=TEXT):
    done = command("explain", folder, text, "--json", *more)
    assert done.code == 0, done.err
    return json.loads(done.out)


def logits(folder, features):
    """The model's own, of a CSR matrix of scipy."""
    with no_grad():
        return load(folder).model.eval()(csr_from_scipy(features)).data.double().numpy()


def test_terms_and_the_rest_are_the_logit(command, folder):
    answer = explained(command, folder, "--top", "3")
    classifier = load(folder)
    right = logits(folder, classifier.features([TEXT]))[0]
    assert answer["text"] == TEXT
    assert [each["label"] for each in answer["labels"]] == [classifier.targets.labels[i] for i in np.argsort(-right)]
    assert sum(each["probability"] for each in answer["labels"]) == pytest.approx(1)
    for each, logit in zip(answer["labels"], np.sort(right)[::-1], strict=True):
        values = [term["value"] for term in each["terms"]]
        assert each["logit"] == pytest.approx(logit, rel=1e-6)
        assert sum(values) + each["rest"] == pytest.approx(logit, rel=1e-6)
        assert values == sorted(values, reverse=True)
        words = {word for term in each["terms"] for word in term["term"].split(" / ")}
        assert {"wheat", "harvest", "tariff"} <= words
        assert "year," not in words


def test_a_term_gives_its_gradient_times_its_weight(command, folder):
    """Beside differences of the logits of a text whose one weight is a little larger."""
    classifier = load(folder)
    features = classifier.features([TEXT]).astype(np.float64)
    answer = explained(command, folder, "--top", "1")["labels"][0]
    place, step, found = classifier.targets.labels.index(answer["label"]), 1e-4, []
    classifier.model.double()
    for entry in range(features.nnz):
        moved = []
        for sign in (-1, 1):
            other = features.copy()
            other.data[entry] *= 1 + sign * step
            with no_grad():
                moved.append(classifier.model.eval()(csr_from_scipy(other)).data[0, place].item())
        found.append((moved[1] - moved[0]) / (2 * step))
    values = [term["value"] for term in answer["terms"]]
    np.testing.assert_allclose(sorted(values), sorted(found), atol=1e-5)


def test_a_text_without_known_terms(command, folder):
    done = command("explain", folder, "", TEXT)
    assert (
        done.err == "note: 1 of 2 texts contains no term that the model knows: its answer does not depend on the text\n"
    )


def test_text_for_people(command, folder):
    done = command("explain", folder, TEXT, "--top", "1", "--terms", "2")
    first, label, *rows = done.out.splitlines()
    assert first == f"'{TEXT}'"
    assert ": probability 0." in label
    assert [row.split("  ")[2].strip() for row in rows][-2:] == ["other terms", "rest"]
    assert len(rows) == 4
    logit = float(label.rpartition(" ")[2])
    values = [float(next(cell for cell in row.split("  ")[3:] if cell.strip())) for row in rows]
    assert sum(values) == pytest.approx(logit, abs=3e-3)
    assert "++++" in done.out


def test_texts_from_standard_input_and_without_a_known_term(command, folder):
    done = command("explain", folder, "--json", "--top", "1", stdin="zzz\n\nwheat\n")
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["text"] for answer in answers][-1] == "wheat"
    first = answers[0]["labels"][0]
    if "hash" not in folder.name:
        assert first["terms"] == []
        assert first["rest"] == first["logit"]


def test_other_runs_are_refused(command, request):
    table = request.getfixturevalue("table_run")[0]
    done = command("explain", table, "a text")
    assert done.code == 2
    assert done.err == f"error: {table} is a table run: explain requires a text run\n"
