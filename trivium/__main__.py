"""`python -m trivium` is the command `trivium`."""

from trivium.cli import main

main()
