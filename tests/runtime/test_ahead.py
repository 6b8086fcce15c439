"""Kernels compiled ahead of their launches: Triton finds each."""

import json
import os
import subprocess
import sys

from tests.runtime.test_fast_launch import ROOT


def test_every_kernel_has_the_key_that_triton_looks_for(seen):
    assert len(seen["keys"]) > 60
    assert {name: wrong for name, wrong in seen["keys"].items() if wrong} == {}


def test_kernels_are_compiled_by_processes_and_then_found(seen):
    assert seen["ahead"] == {"jobs": 4, "before": 0, "after": 4, "seen": [[0, 4], [1, 4], [2, 4], [3, 4], [4, 4]]}


HASHES = """
import importlib, json, sys
from minidl.runtime import cache_keys
from minidl.tools.doctor.jobs import kernels
found = {}
for name in kernels()[:: int(sys.argv[1])]:
    module, function = name.split(":")
    kernel = getattr(importlib.import_module(module), function)
    cache_keys.compute_key(kernel)
    found[name] = kernel.cache_key, [(n, str(v)) for (n, _), (v, _) in kernel.used_global_vals.items()]
json.dump(found, sys.stdout)
"""


def test_the_key_of_a_kernel_does_not_depend_on_which_were_met_before():
    one, other = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", HASHES, order], capture_output=True, text=True, cwd=ROOT, check=True,
                env={**os.environ, "TRITON_INTERPRET": "0"},
            ).stdout
        )
        for order in ("1", "-1")
    )  # fmt: skip
    assert len(one) > 60
    assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}
    # Triton sorts constants of one name by where they lie in memory.
    twice = {name for name, (_, constants) in one.items() if len(dict(constants)) < len({(n, v) for n, v in constants})}
    assert twice == set()
