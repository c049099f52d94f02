"""Types, errors, tokens, ports and tasks that every other package uses.

Knows no other package of kvferry.
"""
