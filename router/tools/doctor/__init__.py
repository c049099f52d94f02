"""`kvferry doctor` and `kvferry check`: find problems of a fleet or a file, and the remedy."""
