"""The `memest` command, and `python -m offload.tools.memest`."""

from offload.tools.memest.cli import main

if __name__ == "__main__":
    main()
