"""Metrics, traces, log lines and the decision log: what a router tells about itself.

Told by the engine and the web layer; decides nothing.
"""
