"""State files on disk: named, verified, durable, deleted; safe in a crash.

Knows no requests and no prices. `format` knows the bytes, the rest knows the files.
"""
