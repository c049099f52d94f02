"""Measurements, each a command: `python -m bench.NAME`. README.md says what they show.

Nothing here is a test: no bench fails for being slow, and `router` never imports this package.
"""
