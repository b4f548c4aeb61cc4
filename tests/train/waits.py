"""A child process that does nothing until its stdin ends."""

import sys

sys.stdin.read()
