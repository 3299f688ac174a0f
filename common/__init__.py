"""What all twelve scripts share. The algorithms are in the scripts."""


class UsageError(ValueError):
    """Bad input: one line for the user and exit code 2. One rank may raise it alone and end all."""
