"""``python -m ggufc`` and the ``ggufc`` script.

Loading the command line takes a moment in which an interrupt would print a traceback from the middle of some import. Until
``ggufc.cli.failures`` catches interrupts, and once it is done, one ends the process with the same word and exit code.
"""

import os
import signal
import sys


def _leave(signum: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def main() -> None:
    """Entry point. A SIGINT that the parent ignores (``nohup``, background jobs of a script) stays ignored."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    from ggufc.cli import cli
    from ggufc.cli.failures import run

    code = run(cli, sys.argv[1:], interruptible)
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    sys.exit(code)


if __name__ == "__main__":
    main()
