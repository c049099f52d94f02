"""Commands on a running router over HTTP: `kvferry top`, `snapshots`, `explain`, `drain`, `reload`.

These modules import nothing of the router.
"""
