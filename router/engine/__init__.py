"""Carries out the effects of the scheduler, and reports the results to it.

The only writer of the scheduler's state. Knows ports, not llama-server, files or HTTP.
"""
