"""The cold tier: copies of snapshots in an object store, or in a directory that hosts share."""
