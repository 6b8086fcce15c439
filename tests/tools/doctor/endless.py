"""Stands for a compiler that does not come to an end."""

import time

time.sleep(60)
