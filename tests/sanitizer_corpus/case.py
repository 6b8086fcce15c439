"""A case of the corpus: a launch that has one planted bug, or none though it looks like one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    """`run` makes tensors and launches; that of a clean case returns what came out and what should."""

    name: str
    kind: str
    expect: str
    run: Callable

    def right(self):
        """Whether the plain interpreter's result is the expected one."""
        torch.manual_seed(0)
        got, want = self.run()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Cases(list):
    """The cases of one kernel, each declared by a decorator that names its kind."""

    def bug(self, kind):
        return self._declare(kind, "bug")

    def clean(self, kind):
        return self._declare(kind, "clean")

    def _declare(self, kind, expect):
        def declare(run):
            kernel = run.__module__.rpartition(".")[2]
            self.append(Case(f"{kernel}.{run.__name__}", kind, expect, run))
            return run

        return declare
