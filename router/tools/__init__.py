"""The `kvferry` command: `cli.py` parses, each folder is a command or a few of a kind."""
