"""How tests read the message of what is refused."""

import re

import pytest


def says(call, *parts):
    """The call fails with a message that holds every one of these patterns."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        call()
    message = str(caught.value)
    for part in parts:
        assert re.search(part, message), f"{part!r} is not in {message!r}"


def one_line(error):
    """Whether the message of what `pytest.raises` has caught is one line."""
    return "\n" not in str(error.value)
