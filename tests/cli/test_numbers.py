"""Tables whose numbers have signs of currencies, percent signs and groups of digits, from training to answers."""

import json

from tests.cli.conftest import write_csv

REGRESSION = ("--task", "regression")


def test_numbers_as_people_write_them(command, tmp_path):
    """The format that training saw is that of all commands."""
    rows = [(f"${i * 37:,}", f"{i}%", f"{1000 + 3 * i:,}") for i in range(80)]
    data = write_csv(tmp_path / "money.csv", rows, ("price", "share", "y"))
    given = ("--data", data, "--target", "y", "--epochs", "2", "--hidden", "4", "--no-plots")
    result = command("train", "table", *given, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    note = "column 'price': '$1,036' is read as 1036; --numbers comma reads it as 1.036"
    assert f"\nnote: {note}\n" in result.out
    assert f"\nnote           {note}\n" in (tmp_path / "run" / "report.txt").read_text()
    asked = ['{"price": "$1,036", "share": "28%"}', '{"price": 1036, "share": "28 %"}']
    found = [json.loads(line)["prediction"] for line in command("predict", tmp_path / "run", *asked).out.splitlines()]
    assert found[0] == found[1] > 500
    sent = command("predict", tmp_path / "run", stdin="sep=;\nshare;price\n28%;$1,036\n")
    assert json.loads(sent.out)["prediction"] == found[0]
    bad = command("predict", tmp_path / "run", '{"price": 1036, "share": 28}')
    assert (bad.code, "column 'share': 28 where a finite number is expected" in bad.err) == (2, True)
    assert command("evaluate", tmp_path / "run", "--data", data).code == 0
    result = command(
        "train", "table", *given, "--out", tmp_path / "plain", "--numbers", "plain", "--task", "regression"
    )
    assert (result.code, "'1,000' where the target of a regression" in result.err) == (2, True)
