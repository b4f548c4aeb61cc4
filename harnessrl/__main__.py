"""`python -m harnessrl` is the command `harnessrl`."""

from harnessrl.cli import main

if __name__ == "__main__":
    main()
