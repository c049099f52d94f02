"""What an operator does from a terminal with a router that runs: everything over HTTP."""
