"""Stands for a compiler that takes the whole process down: importing this ends it."""

import os
import sys

print("the compiler is not amused", file=sys.stderr, flush=True)
os._exit(3)
