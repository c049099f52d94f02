"""`kvferry demo`: starts llama-servers and shows what kvferry saves; also for tests and benches.

Knows how a llama-server is found, started, watched and stopped, and where a small model comes from.
"""
