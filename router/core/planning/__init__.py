"""Prices in seconds: each way to serve a request, and the cheapest of them.

Changes nothing: plans are data. Knows no queue and no effects.
"""
