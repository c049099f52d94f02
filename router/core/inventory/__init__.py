"""All backends, slots and snapshots, with their indexes and the eviction order.

Knows nothing of queued requests, prices or jobs.
"""
