"""Types, errors, tokens, ports and tasks that every other package uses.

Imports no other package of kvferry.
"""
