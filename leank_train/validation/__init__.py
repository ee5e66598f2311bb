"""The fast check of a new mask inside its run; figures come from `python -m eval`."""
