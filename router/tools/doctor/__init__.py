"""`kvferry doctor` and `kvferry check`: find problems of servers or a file, and the remedy."""
