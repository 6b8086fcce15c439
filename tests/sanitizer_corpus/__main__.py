"""Runs a sanitizer over the corpus: python -m tests.sanitizer_corpus [--with triton-viz] [--json FILE]

Each case runs in a process of its own, since a planted bug may corrupt or end it. Seconds are of the processor, summed
over the clean cases, each run a second time: without a sanitizer the others are not worth timing.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

TOOLS = ("minidl", "triton-viz")
_LIMIT = 60


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--with", dest="tool", choices=TOOLS, default="minidl")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("nothing", *TOOLS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        with contextlib.redirect_stdout(sys.stderr):
            told = list(outcomes(options.only))
        print(json.dumps(told))
        return
    plain, checked = (_in_own_process(tool) for tool in ("nothing", options.tool))
    summary = summarise(plain, checked)
    _print(options.tool, summary, checked)
    if options.json:
        versions = {name: version(name) for name in ("triton", "torch", options.tool)}
        report = {"tool": options.tool, "versions": versions, **summary, "cases": checked}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def _in_own_process(tool):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.sanitizer_corpus", "--only", tool]
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def outcomes(tool):
    """What a tool says to each case: "quiet", "found" with the kinds, "error" or "crash"."""
    check = {"nothing": _unchecked, "minidl": _by_minidl, "triton-viz": _by_triton_viz}[tool]()
    from tests.sanitizer_corpus import all_cases

    check(all_cases()[0])
    for case in all_cases():
        yield {"name": case.name, "kind": case.kind, "expect": case.expect, **_apart(check, case)}


def _unchecked():
    def check(case):
        case.run()
        return []

    return check


def _by_minidl():
    from minidl.testing import SanitizerError, sanitize

    def check(case):
        try:
            with sanitize():
                case.run()
        except SanitizerError as error:
            return sorted({finding.kind for finding in error.findings})
        return []

    return check


def _by_triton_viz():
    """Kernels are traced from their declaration on; a finding ends the program with 1, as it does by default."""
    import triton
    import triton_viz
    from triton_viz.clients import Sanitizer

    jit = triton.jit
    triton.jit = lambda function: triton_viz.trace(client=Sanitizer())(jit(function))

    def check(case):
        try:
            case.run()
        except SystemExit:
            return ["out of bounds"]
        return []

    return check


def _apart(check, case):
    """Check a case in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_LIMIT)
        os.write(writer, json.dumps(_timed(check, case)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return json.loads(told) if told else {"outcome": "crash", "seconds": None}


def _timed(check, case):
    import torch

    try:
        for _ in range(2 if case.expect == "clean" else 1):
            torch.manual_seed(0)
            start = time.process_time()
            kinds = check(case)
        told = {"outcome": "found", "kinds": kinds} if kinds else {"outcome": "quiet"}
    except BaseException as error:  # noqa: BLE001 (it is what the tool did)
        told = {"outcome": "error", "error": f"{type(error).__name__}: {error}"[:200]}
    return {**told, "seconds": round(time.process_time() - start, 4)}


def summarise(plain, checked):
    """Counts by kind, and the seconds of the clean cases that both runs finished."""
    bugs = [case for case in checked if case["expect"] == "bug"]
    clean = [case for case in checked if case["expect"] == "clean"]
    planted, found = (Counter(c["kind"] for c in cases) for cases in (bugs, filter(_found, bugs)))
    both = [(p, c) for p, c in zip(plain, checked, strict=True) if c["expect"] == "clean" and _finished(p, c)]
    seconds = [round(sum(case["seconds"] for case in cases), 2) for cases in zip(*both, strict=True)]
    return {
        "found": len(list(filter(_found, bugs))),
        "missed": [case["name"] for case in bugs if not _found(case)],
        "false_alarms": [case["name"] for case in clean if _found(case)],
        "errors_in_clean_cases": [case["name"] for case in clean if case["outcome"] in ("error", "crash")],
        "by_kind": {kind: {"planted": count, "found": found[kind]} for kind, count in planted.most_common()},
        "seconds": {"clean_cases": len(both), "plain": seconds[0], "checked": seconds[1]},
        "ratio": round(seconds[1] / seconds[0], 1),
    }


def _found(case):
    return case["outcome"] == "found"


def _finished(*cases):
    return all(case["outcome"] in ("found", "quiet") for case in cases)


def _print(tool, summary, checked):
    print(f"{'kind':20} planted  found")
    for kind, count in summary["by_kind"].items():
        print(f"{kind:20} {count['planted']:7} {count['found']:6}")
    print(f"{'all':20} {sum(c['expect'] == 'bug' for c in checked):7} {summary['found']:6}")
    for what in ("missed", "false_alarms", "errors_in_clean_cases"):
        print(f"{what.replace('_', ' ')}: {len(summary[what])}", *summary[what], sep="\n    ")
    seconds = summary["seconds"]
    print(
        f"{seconds['clean_cases']} clean cases: {seconds['plain']} s plain, {seconds['checked']} s with {tool}, "
        f"{summary['ratio']} times"
    )


if __name__ == "__main__":
    main()
