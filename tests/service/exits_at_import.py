"""A module that no harness can be found in: importing it ends in SystemExit."""

raise SystemExit(5)
