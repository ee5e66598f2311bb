"""What stands for the making of a portion in processes of their own; it imports nothing heavy."""

import os
import signal
import time


def make(portion, results):
    """Fail, die, or take long if the names of the portion's items say so; else leave a file of each name."""
    names = [part.item for part in portion.parts]
    if "die" in names:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fail" in names:
        raise ValueError(f"{names[0]} cannot be made")
    if "slow" in names:
        time.sleep(60)
    for name in names:
        (results.path.parent / name).write_text("made")
