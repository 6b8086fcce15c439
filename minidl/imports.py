"""Imports in threads that must not run beside each other."""

from __future__ import annotations

import threading

# Held while torch or scikit-learn is imported. scikit-learn's import asks torch for its types where `sys.modules` has
# it, and fails on a torch that another thread has only begun to import.
apart = threading.RLock()
