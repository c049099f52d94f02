"""What is said of a request when it is over: its record, and why each token was computed.

Explains decisions and makes none.
"""
