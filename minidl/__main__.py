"""`python -m minidl`: the command line."""

from minidl.cli import main

main()
