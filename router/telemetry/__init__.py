"""Metrics, traces, log lines and the decision log of a router.

The engine and the web layer report to this package; it decides nothing.
"""
