"""What differs between the releases of transformers that are supported, 5.17 to 5.24; no other module asks for one."""

from packaging.version import Version
from transformers import __version__

RELEASE = Version(__version__)

# The argument and the output field that hold a model's cache; 5.24 takes the old name as well, until 5.40.
CACHE = "cache" if Version("5.24") <= RELEASE else "past_key_values"

# Whether `generate(prefill_chunk_size=...)` goes on from what a cache holds; before, it read the held tokens again.
CHUNKS_GO_ON = Version("5.23") <= RELEASE

# Whether gradient checkpointing leaves a pass without gradients its cache; before, every pass in training mode lost it.
CHECKPOINTING_KEEPS_CACHE = Version("5.24") <= RELEASE

# Whether a layer of linear attention begins with `Cache.get_conv_state`; before, it began with `has_previous_state`.
GETS_STATES = Version("5.21") <= RELEASE
