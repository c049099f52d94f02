"""Servers on demand on the command line: the flags of `kvferry serve`, and other tools' files."""
