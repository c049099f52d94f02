"""`kvferry simulate`: the production scheduler over servers that exist only as numbers.

Owns simulated time, servers and workloads. Every decision is made by `router.core`, which is told
the same events as in production.
"""
