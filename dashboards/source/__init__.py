"""The dashboards as Python; `python -m dashboards.source` writes the JSON that Grafana loads.

A panel's description says shortly what it shows and what to do about it; `docs/metrics.md` says it
of each metric.
"""
