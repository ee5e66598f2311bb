"""What attention computes in training: Eq. 1, prefill once, branches; `attention` is the slow form of `fused`."""
