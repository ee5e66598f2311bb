"""Learn a static K-cache channel mask for a RoPE decoder (LeanK, stages 1 and 2)."""

from leank.extras import require

require("leank_train", "train", "hydra", "lightning", "pandas", "matplotlib")
