"""Helpers of `test_cold_import.py` that other tests use, too."""

from __future__ import annotations

PROBE = """
import sys
for name in sys.argv[2].split(","):
    __import__(name)
banned = [name for name in sys.argv[1].split(",") if name in sys.modules]
assert not banned, f"imported {banned}"
"""
