"""Errors that are printed as they are: the user's input is wrong (exit code 2), or the run cannot go on (exit code 1)."""


class ConfigError(Exception):
    """Bad input of a user, found before anything was started; its text names the key or file and what is allowed."""


class RunError(Exception):
    """A run cannot go on, through no fault of its input; its text says what happened, where, and what was kept."""
