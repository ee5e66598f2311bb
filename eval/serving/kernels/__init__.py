"""Triton kernels over the pages of a served cache; launched by `eval.serving.paged`."""
