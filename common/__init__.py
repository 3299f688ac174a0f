"""What all twelve scripts share, and nothing about learning."""


class UsageError(ValueError):
    """Bad input: one line for the user and exit code 2. Raised by all ranks alike."""
