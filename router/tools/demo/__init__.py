"""`kvferry demo`: start llama-servers and show what kvferry saves.

Tests and benches also use its modules that find, start, watch and stop a llama-server and fetch a
small model.
"""
