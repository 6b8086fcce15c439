"""Runs packages of Triton kernels under the sanitizer: python -m tests.trials.foreign [--only liger] [--json F]

pip fetches them, at the versions in packages.py, to a temporary folder; nothing of them stays. Tensors are on the CPU.
Ends with 1 at a finding, a result or an error that explained.py does not tell of.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tests.trials.foreign import explained
from tests.trials.foreign.packages import PACKAGES, kernels

CLOSE = 5e-3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[package.name for package in PACKAGES])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows, unexplained = [], []
    for package in PACKAGES:
        if options.only in (None, package.name):
            row = tried(package)
            rows.append(row)
            unexplained += row.pop("unexplained")
    table(rows)
    print(*(f"not explained: {line}" for line in unexplained), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(report(rows), indent=1) + "\n")
    sys.exit(bool(unexplained))


def tried(package):
    """A row of the table, with what is found and what cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        fetch(package, folder)
        start = time.monotonic()
        cases = run(package, folder)
        seconds = time.monotonic() - start
        count = kernels(Path(folder) / package.folder)
    launches = [launch for case in cases for launch in case["launches"]]
    found = distinct(cases)
    return {
        "package": package.distribution, "version": package.version, "kernels": count,
        "launched": len({(launch["file"], launch["kernel"]) for launch in launches}),
        "launches": sum(launch["count"] for launch in launches), "cases": len(cases),
        "not_run": {case["case"]: last_line(case) for case in cases if "error" in case},
        "off": {case["case"]: far(case["off"]) for case in cases if "error" not in case and case["off"] > CLOSE},
        "findings": found, "seconds": round(seconds, 1), "unexplained": list(unknown(package, cases, found)),
    }  # fmt: skip


def fetch(package, folder):
    wanted = f"{package.distribution}=={package.version}", *package.needs
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip cannot fetch {' '.join(wanted)}: this trial needs a network.\n{done.stderr}")


def run(package, folder):
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GEMS_VENDOR": "nvidia",
        "FLAGGEMS_CACHE_DIR": f"{folder}/made", "PYTHONPATH": os.pathsep.join((folder, str(Path.cwd()))),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "tests.trials.foreign.child", package.name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.replace(f"{folder}/", ""))


def distinct(cases):
    """Each finding once: a kernel's line and tensor, whichever cases show it."""
    found = {}
    for case in cases:
        for finding in case["findings"]:
            key = tuple(finding[name] for name in ("kind", "kernel", "file", "line", "tensor"))
            found.setdefault(key, {"case": case["case"], **finding})
    for finding in found.values():
        finding["judgement"] = explained.judgement(finding)
    return list(found.values())


def unknown(package, cases, found):
    for finding in found:
        if finding["judgement"] is None:
            yield f"{package.name}: {finding['kind']} in {finding['kernel']}, {finding['file']}:{finding['line']}"
    for case in cases:
        name = f"{package.name}.{case['case']}"
        if "error" in case:
            if name not in explained.NOT_RUN:
                yield f"{name}: {case['error']}"
        elif case["off"] > CLOSE and name not in explained.OFF:
            yield f"{name}: a result is off by {case['off']:.2g}"


def far(off):
    return round(off, 4) if off < float("inf") else "not finite"


def last_line(case):
    return case["error"].strip().splitlines()[-1][:200]


def table(rows):
    print(f"{'package':22} {'version':8} kernels launched launches cases not run findings seconds")
    for row in rows:
        print(
            f"{row['package']:22} {row['version']:8} {row['kernels']:7} {row['launched']:8} {row['launches']:8} "
            f"{row['cases']:5} {len(row['not_run']):7} {len(row['findings']):8} {row['seconds']:7}"
        )
        for finding in row["findings"]:
            print(f"    {finding['judgement'] or '?':9} {finding['kind']} in {finding['kernel']}: {finding['what']}")


def report(rows):
    versions = {name: version(name) for name in ("triton", "torch", "minidl")}
    return {"device": "cpu", "date": str(date.today()), "versions": versions, "rows": rows}


if __name__ == "__main__":
    main()
