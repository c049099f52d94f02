"""Other hosts of a fleet: their names, what they hold, what they quote.

Each host has a kvferry that drives the llama-servers of that host alone. Knows no slots and no
clients: `web` asks it where to send a request, and serves the calls of peers.
"""
