"""From a lease to the end of its request: steps, prefill queue, placement gate, completion, saves.

Knows not which request is served next: that is `admission`.
"""
