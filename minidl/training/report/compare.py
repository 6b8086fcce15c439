"""`minidl compare`: finished runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from minidl.common.console import cut
from minidl.training.report import metrics, page, report_files
from minidl.training.run_folder import files
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.manifest import REPORT
from minidl.training.run_folder.progress import restoring
from minidl.training.settings.command import Compare
from minidl.training.settings.declaration import flag

_BASELINES = ("majority", "mean", "linear")  # that have rows


class Compared(NamedTuple):
    """A finished run: its name, report, settings, and the records of its epochs."""

    name: str
    report: dict[str, Any]
    settings: dict[str, Any]
    history: list[dict[str, Any]]


def compared(config: Compare) -> list[Compared]:
    """Return the runs, in their order. Raises ConfigError for a folder that is not a finished run, DamagedError."""
    runs = []
    for folder in map(Path, config.runs):
        run = RunFolder(folder).read_finished()
        run.show_notes()
        metrics_file = folder / "metrics.jsonl"
        lines = files.as_text(run.read(metrics_file.name), metrics_file).splitlines()
        history = [files.as_json(line.encode(), metrics_file) for line in lines]
        one = Compared(str(folder), files.read_json(folder / REPORT), run.config, history)
        with restoring(folder / REPORT) as parts:
            parts.append("it is no report of a run")
            table = rows([one])
        with restoring(metrics_file) as parts:
            parts.append("they are no figures of epochs")
            page.as_comparison(table, {one.name: history})
        runs.append(one)
    return runs


def rows(runs: list[Compared]) -> list[list[str]]:
    """Return a row for each figure and each setting that differs: its name, then a cell for each run."""
    table = [["", *(run.name for run in runs)], ["task", *(str(run.report["task"]) for run in runs)]]
    table.append(["data", *(cut(run.report["data"], 40) for run in runs)])
    for name, title in metrics.TITLES.items():
        if any(name in run.report for run in runs):
            table.append([title, *(report_files.score(run.report, name) for run in runs)])
            for method in _BASELINES:
                baselines = [run.report.get("baseline", {}).get(method, {}) for run in runs]
                if any(name in scores for scores in baselines):
                    table.append([f"{title}, {method}", *(report_files.score(scores, name) for scores in baselines)])
    table.append(["epochs", *(f"{run.report['epochs']:,}" for run in runs)])
    table.append(["seconds", *(f"{run.report['seconds']:,.1f}" for run in runs)])
    table.append(["parameters", *(f"{page.parameters(run.report):,}" for run in runs)])
    table.append(["device", *(report_files.device(run.report) for run in runs)])
    for name in dict.fromkeys(name for run in runs for name in run.settings):
        values = [run.settings.get(name) for run in runs]
        if name != "data" and any(value != values[0] for value in values):
            table.append([flag(name), *("-" if v is None else cut(v, 40) for v in values)])
    return table


def compare(config: Compare) -> str:
    """Return the table as text; write the page of --html. Raises as `compared` does."""
    runs = compared(config)
    table = rows(runs)
    if config.html is not None:
        files.write_text(config.html, page.as_comparison(table, {run.name: run.history for run in runs}))
    first, *others = table
    return "\n".join(report_files.table(first, others)) + "\n"
