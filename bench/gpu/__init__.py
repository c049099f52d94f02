"""All measurements that need a GPU, by one command on a machine without a network.

`bundle` packs what such a machine lacks, `run` (a script) takes it from there.
"""
