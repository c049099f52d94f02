"""kvferry: a reverse proxy that moves KV state files between llama-server slots.

`docs/architecture.md` is the map. `core` decides, `engine` acts on it, `adapters` talk to
llama-server and the disk, `web` talks to clients, `main` builds all of it.
"""

__version__ = "0.1.0"
