"""More classes than a confusion matrix shows: training, evaluation and predictions."""

import json

from tests.cli.conftest import SMALL, report, write_csv


def test_a_run_of_many_classes(command, tmp_path):
    rows = [(f"word{i} number{j}", f"class {i}") for i in range(300) for j in range(3)]
    write_csv(tmp_path / "many.csv", rows)
    run = tmp_path / "run"
    done = command("train", "text", "--data", tmp_path / "many.csv", "--out", run, *SMALL[:-1])
    assert done.code == 0, done.err
    assert "\nthe 50 most frequent of 300 classes; report.json has all of them\n" in done.out
    content = report(run)
    assert len(content["per_class"]) == 300
    assert "confusion" not in content
    assert content["confusions"]
    assert (run / "confusion.png").stat().st_size > 1000
    done = command("evaluate", run, "--json", tmp_path / "scores.json")
    assert "\nthe 50 most frequent of 300 classes; --json FILE writes all of them\n" in done.out
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert all(scores[name] == content[name] for name in ("accuracy", "macro_f1", "per_class", "confusions"))
    done = command("predict", run, "word3", "--top", "300")
    assert len(json.loads(done.out)["top"]) == 300
