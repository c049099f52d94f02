"""State files on disk: named, verified, made durable and deleted, safe in a crash.

Knows no requests and no prices. `format` knows the bytes, the other modules know the files.
"""
