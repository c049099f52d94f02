"""`kvferry simulate`: the production scheduler over servers that exist only as numbers.

Owns simulated time, simulated servers and workloads. Decides nothing: every decision is
`router.core`'s, told the same events as in production.
"""
