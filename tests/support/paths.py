"""Paths of the repository's own files."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TEMPLATES = ROOT / "tests" / "templates"
