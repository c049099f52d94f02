"""Where bytes of states are: a directory, a bucket, another host. And their seals."""
