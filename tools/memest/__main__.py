"""`python -m offload.tools.memest`."""

from offload.tools.memest.cli import main

main()
