"""The data of the core: slots, jobs, queued requests, plans, events, effects.

Each module answers questions about its own data; no module knows the whole inventory.
"""
