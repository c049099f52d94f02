"""The dashboards as Python; `python -m dashboards.source` writes the JSON that Grafana loads.

A panel's description says in short what the panel shows and what to do about it. `docs/metrics.md`
explains each metric.
"""
