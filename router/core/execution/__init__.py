"""Run a job from its lease to the end of its request: steps, waits, completion, saves.

`admission` decides which request is served next; this package does not.
"""
