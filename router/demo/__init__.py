"""Starts llama-server processes for `kvferry demo`, the tests and the benches.

Knows how a llama-server is found, started, watched and stopped, and where a small model comes
from. Knows nothing of slots, snapshots or requests: the router never imports this package.
"""
