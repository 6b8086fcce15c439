"""The compiling process, which never interprets. It reads requests from standard input and answers on standard output.

Both are JSON, one line each:

    {"plan": arguments of plan.make}  ->  the fields of a CompilePlan
    {"compile": fields of a Job}      ->  the fields of Figures
    {"versions": true}                ->  versions of Python, torch and Triton

The output of the compiler goes to standard error.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from typing import Any

from minidl.compilation.job import Job


def main() -> None:
    """Answer until standard input ends."""
    # All other output, also of compilers, goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. Raises ValueError for an unknown one."""
    if "compile" in request:
        from minidl.tools.doctor import offline

        return asdict(offline.compile_job(Job(**request["compile"])))
    if "plan" in request:
        from minidl.tools.doctor import plan

        return asdict(plan.make(**request["plan"]))
    if "versions" in request:
        import torch
        import triton

        return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    raise ValueError(f"unknown request {sorted(request)}")


if __name__ == "__main__":
    main()
