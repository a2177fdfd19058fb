"""`python -m minipipe` is the same as `minipipe`."""

from minipipe.cli import main

if __name__ == "__main__":
    main()
