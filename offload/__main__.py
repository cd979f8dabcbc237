"""The `offload` command, and `python -m offload`."""

from offload.cli import main

if __name__ == "__main__":
    main()
