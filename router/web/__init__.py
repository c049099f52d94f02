"""HTTP: `server` (connections, relaying), `api` (clients' routes), `admin` (operators' routes).

`app.py` is the one handler. Talks to the engine; reads the scheduler's state and never changes it.
"""
