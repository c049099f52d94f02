"""Servers on demand as processes: find the program, start, watch and end it, keep its log.

Knows nothing of requests and slots: the scheduler orders starts and stops.
"""
