"""Carries out the effects of the scheduler, and tells it what came of them.

The only writer of the scheduler's state. Knows ports, not llama-server, files or HTTP.
"""
