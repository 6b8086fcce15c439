"""Runs the cases of one package under the sanitizer, each in a fork: python -m tests.trials.foreign.child liger"""

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from importlib import import_module

import torch
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

from minidl.testing import SanitizerError, sanitize
from minidl.testing.sanitizer.autotuned import configured
from tests.trials.foreign.case import error

LIMIT = 240


def main(name, only):
    told = []
    for case, run in import_module(f"tests.trials.foreign.{name}").cases.items():
        if only in ("", case):
            with contextlib.redirect_stdout(sys.stderr):
                told.append({"case": case, **apart(run)})
            print(case, told[-1].get("error", "")[-300:], round(told[-1]["seconds"], 1), file=sys.stderr)
    print(json.dumps(told))


def apart(run):
    """Runs a case in a fork of this process, as a kernel may end it."""
    reader, writer = os.pipe()
    child = os.fork()
    start = time.monotonic()
    if child == 0:
        os.close(reader)
        signal.alarm(LIMIT)
        with os.fdopen(writer, "w") as answer:
            json.dump(checked(run), answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status = os.waitpid(child, 0)
    told = json.loads(text) if text else {"launches": [], "findings": [], "error": f"ended with {status}"}
    return {**told, "seconds": round(time.monotonic() - start, 2)}


def checked(run):
    """What the sanitizer finds in a case, which kernels it launches, and how far its results are off."""
    torch.manual_seed(0)
    launches, sanitizer, said, off = counted(), None, "", None
    try:
        with sanitize() as sanitizer:
            off = max((error(got, want) for got, want in run()), default=0.0)
    except SanitizerError as found:
        cause = found.__cause__
        said = "".join(traceback.format_exception(cause)) if cause else ""
    except BaseException as failed:  # noqa: BLE001 (told in the table)
        said = "".join(traceback.format_exception(failed))
    found = [] if sanitizer is None else [as_json(finding) for finding in sanitizer.findings]
    told = [{"file": file, "kernel": kernel, "count": count} for (file, kernel), count in launches.items()]
    if found and not said and all(map(is_harmless, found)):
        off = min(off, plain(run))
    return {"launches": told, "findings": found, "off": off, **({"error": said} if said else {})}


def is_harmless(finding):
    """Whether a case with this finding cannot end the process."""
    return not finding["kind"].startswith("out-of-bounds") or "in a gap" in finding["what"]


def plain(run):
    """How far a case is off without the checks, which skip a bad access and mark masked lanes."""
    torch.manual_seed(0)
    tuned = Autotuner.run

    def untuned(tuner, *args, **kwargs):
        with configured(tuner, tuner.configs[0]):
            return tuned(tuner, *args, **kwargs)

    Autotuner.run = untuned
    try:
        return max((error(got, want) for got, want in run()), default=0.0)
    except Exception:  # noqa: BLE001 (where the first configuration is one that the kernel refuses)
        return float("inf")


def counted():
    """The launches from here on, by file and name of the kernel."""
    launches, call = {}, interpreter.GridExecutor.__call__

    def counting(executor, *args, **kwargs):
        key = executor.fn.__code__.co_filename, executor.fn.__name__
        launches[key] = launches.get(key, 0) + 1
        return call(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counting
    return launches


def as_json(finding):
    return {
        "kind": finding.kind, "kernel": finding.kernel, "file": finding.place.file, "line": finding.place.line,
        "text": finding.place.text, "tensor": finding.tensor, "what": finding.what, "elements": finding.elements,
        "programs": len(finding.programs),
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
