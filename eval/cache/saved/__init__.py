"""A compressed cache as a file: what the layers hold, in safetensors, with digests of the model, the mask and itself.

The file holds no code and nothing is unpickled. `CompressedCache.save` and `load` are the way in.
"""
