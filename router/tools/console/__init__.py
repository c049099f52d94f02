"""`kvferry top`, `snapshots`, `explain`, `drain`, `reload`: a running router, asked over HTTP.

Imports nothing of the router it asks.
"""
