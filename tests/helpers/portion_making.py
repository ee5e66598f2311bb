"""What stands for the making of a portion in processes of their own; it imports nothing heavy."""

import os
import signal
import time
from pathlib import Path


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


class Together:
    """Makes portions as `make` does. A copy is unpickled only once `number` processes have begun to."""

    def __init__(self, folder: Path, number: int) -> None:
        folder.mkdir(exist_ok=True)
        self.bulk, self.copied = bytes(1 << 20), (_met, (folder, number))  # more than a pipe holds

    def __reduce__(self):
        return *self.copied, self.__dict__  # what meets is called before the rest is read

    def __call__(self, portion, results):
        make(portion, results)


def _met(folder: Path, number: int) -> Together:
    (folder / str(os.getpid())).touch()
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < number:
        if time.monotonic() > deadline:
            raise TimeoutError("the others have not begun")
        time.sleep(0.02)
    return Together.__new__(Together)
