"""Commands on a running router over HTTP: `kvferry top`, `snapshots`, `explain`, `drain`, `reload`.

These modules ask the router over HTTP: they import only `base` and `tools.terminal`.
"""
