"""Triton kernels over the pages of a served cache; `eval.serving.paged` launches them and has the slow form."""
