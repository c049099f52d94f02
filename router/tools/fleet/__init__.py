"""`kvferry fleet`: certificates of the hosts, and the fleet as one of them sees it."""
