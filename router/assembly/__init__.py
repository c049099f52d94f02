"""Builds a running router from a configuration, and rebuilds parts of it at a reload.

Only this package and `tools` import all others.
"""
