"""The one error that means "the user's input is wrong": printed as it is, exit code 2."""


class ConfigError(Exception):
    """Bad input of a user, found before anything was started; its text names the key or file and what is allowed."""
