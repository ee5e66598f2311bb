"""What several methods share: observed queries, calibration, token budgets, sliced passes."""
