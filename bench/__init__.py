"""Measurements, each a command: `python -m bench.NAME`. README.md describes each.

Nothing here is a test: no bench fails for being slow. `router` never imports this package.
"""
