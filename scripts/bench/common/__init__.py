"""What the measurements share: models and caches, timing, and tables."""
