"""A model and its prompts: loading, dense prefill, what is observed in it, greedy decoding."""
