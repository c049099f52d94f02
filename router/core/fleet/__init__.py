"""All backends, slots and snapshots, with the indexes over them and the order of eviction.

Knows nothing of requests in the queue, prices or jobs.
"""
