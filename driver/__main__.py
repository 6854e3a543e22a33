"""``python -m ggufc``."""

from ggufc.cli import main

main()
