"""`python -m minidl.generation.export generator|evaluator RUN FILE`: a run's model as one file of the package.

The file's metadata has the run's command and seed and the commit of the working tree.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from minidl.common.console import echo
from minidl.generation import evaluator
from minidl.models import dcgan
from minidl.training.run_folder.folder import RunFolder
from minidl.training.run_folder.outputs import check_output
from minidl.training.run_folder.provenance import MODEL
from minidl.training.run_folder.saved_run import SavedRun


def command(run: SavedRun) -> str:
    """Return the command that trains a run, with every setting that is one of its flags."""
    words = ["minidl", "train", run.kind]
    for name, value in run.config.items():
        if value is None or value is False or isinstance(value, dict):
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(
                ("x" if name == "size" else ",").join(map(str, value)) if isinstance(value, list) else str(value)
            )
    return shlex.join(words)


def commit() -> str:
    """Return the commit of this package's working tree, with "-dirty" if it has changes; "" without a working tree."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip()


def export(kind: str, folder: Path, path: Path, about_commit: str | None = None) -> None:
    """Write the model of a finished run. Raises ConfigError, DamagedError or ValueError for a run of another kind."""
    run = RunFolder(folder).read_finished()
    training_command = command(run)
    version = commit() if about_commit is None else about_commit
    seed = run.config.get("seed", 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    check_output("FILE", path, MODEL)
    if kind == "generator":
        dcgan.save_generator(dcgan.load_generator(folder), path, command=training_command, seed=seed, commit=version)
    else:
        evaluator.save(folder, path, {"command": training_command, "seed": str(seed), "commit": version})


def main(arguments: list[str]) -> None:
    """Export a model. Raises SystemExit unless there are three arguments (or four, with a commit, without git)."""
    if not 3 <= len(arguments) <= 4 or arguments[0] not in ("generator", "evaluator"):
        sys.exit(__doc__)
    export(arguments[0], Path(arguments[1]), Path(arguments[2]), *arguments[3:])
    echo(f"{arguments[2]}: {Path(arguments[2]).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
