"""`python -m tests.cluster`."""

from .cli import main

main()
