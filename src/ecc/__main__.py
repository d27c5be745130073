"""`python -m ecc` is `ecc`."""

from ecc.cli import main

main()
