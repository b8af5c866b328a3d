"""What tests share: nothing here is a test, and no test module is imported by another."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The checkout."""
