"""`kvferry simulate`: the production scheduler over simulated servers.

The package owns simulated time, servers and workloads. `router.core` makes every decision, from
the same events as in production.
"""
