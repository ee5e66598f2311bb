"""Learn a static K-cache channel mask for a RoPE decoder (LeanK, stages 1 and 2)."""
