"""Decisions: the scheduler is told events and answers with effects. No I/O, no clock, no chance.

Packages, each of which knows only those above it:

- `model`: slots, jobs, events, effects, plans: the data, and what follows from one of them alone
- `inventory`: all backends, slots and snapshots, and the indexes over them
- `planning`: what each way to serve a request costs in seconds, and which way is cheapest
- `reporting`: what is said of a request afterwards
- `execution`: from a lease to the end of its request; idle saves; the queues on the way
- `admission`: which queued request is served next; backends that come and go
- `scheduler.py`: the one entrance; `stats.py`: gauges

Imports `base` and a short list of the standard library only.
"""
