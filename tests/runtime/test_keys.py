"""Kernels have the same keys in every process, whatever it launches first."""

import json
import os
import subprocess
import sys

from minidl.runtime import keys

_KEYS = """
import json, pkgutil, importlib, sys
import minidl.kernels
from triton.runtime.jit import JITFunction
from minidl.runtime import keys
found = {}
for module in pkgutil.walk_packages(minidl.kernels.__path__, "minidl.kernels."):
    found |= {(module.name, n): v for n, v in vars(importlib.import_module(module.name)).items()
              if isinstance(v, JITFunction) and v.__module__ == module.name}
for name in sorted(found, reverse=sys.argv[1] == "reverse"):
    keys.settle(found[name])
json.dump({".".join(name): kernel.cache_key for name, kernel in sorted(found.items())}, sys.stdout)
"""


def keys_of(order):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", _KEYS, order], env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_keys_do_not_depend_on_the_order():
    found = keys_of("reverse")
    assert len(found) > 100
    assert found == keys_of("forwards")


def test_what_is_no_kernel_is_left_alone():
    keys.settle(len)
