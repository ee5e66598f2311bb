"""Settings: Hydra has train and eval, with shared for both; method holds presets, papers the items of the papers."""
