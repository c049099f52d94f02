"""Price each way to serve a request, in seconds, and choose the cheapest.

Changes nothing: plans are data. Knows no queue and no effects.
"""
