"""What all twelve scripts share, and nothing about learning."""

import os
import sys

# If a standard stream is closed (`>&-`), the next file to be opened, such as a checkpoint, gets its
# number, and libraries print into it.
for _name in ("stdin", "stdout", "stderr"):
    if getattr(sys, _name) is None:
        setattr(sys, _name, open(os.devnull, "r" if _name == "stdin" else "w"))  # noqa: SIM115


class UsageError(ValueError):
    """Bad input: one line for the user and exit code 2. Raised by all ranks alike."""
