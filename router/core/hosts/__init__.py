"""What other hosts are told: the price of a request, and the states that they may have."""
