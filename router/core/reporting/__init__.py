"""Reports on finished requests: the record, and why each token was computed.

Explains decisions and makes none.
"""
