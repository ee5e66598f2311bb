"""The kernels, in Triton and CUDA, and the head_dims that each is written for."""

HEAD_DIMS = {
    "decode": (64, 128, 192, 256),  # over every token of a middle in 16 bits
    "codes": (64, 128),  # over a middle in fewer bits, in Triton and in CUDA
    "choose": (64, 128),  # over tokens that a method chooses
    "paged": (32, 64, 128),  # over pages of vLLM's, in eval.serving
}
