"""`kvferry doctor` and `kvferry check`: what is wrong with a fleet or a file, and what to do."""
