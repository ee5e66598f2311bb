"""What the pass over a prompt costs: to the first token, for sums over all queries, shared among methods."""
