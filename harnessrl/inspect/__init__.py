"""Reports on a trace: what it holds, how it merges, where prefixes broke and what would be trained."""

from harnessrl.inspect.command import inspect

__all__ = ["inspect"]
