"""The data of the core: slots, jobs, requests in the queue, plans, events, effects.

Each module answers questions about its own data; none knows the whole fleet.
"""
