"""Settings: train and eval are of one Hydra command each, shared of both; method has presets, papers the papers' items."""
