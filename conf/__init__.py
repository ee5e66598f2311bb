"""Settings: train and eval are Hydra's for one command, shared for both; method has presets, papers the papers' items."""
