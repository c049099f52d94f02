"""Builds a running router from a configuration, and rebuilds parts of it at a reload.

Besides `tools` the only package that knows all others.
"""
