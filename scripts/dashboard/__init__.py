"""One page for many runs: python -m scripts.dashboard FOLDER."""
