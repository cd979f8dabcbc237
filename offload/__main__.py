"""The `offload` command, and `python -m offload`."""

from offload.process.interrupts import ending_at_once


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    with ending_at_once():
        from offload.cli import main as run

        run()


if __name__ == "__main__":
    main()
