"""Two small reference models of LeanK: `reference` and `reference_mixed`; leank finds them by these names."""
