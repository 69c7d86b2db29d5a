"""`python -m pathlens`: the command line, also where its script is not on the path."""

from pathlens.cli import main

if __name__ == "__main__":
    main()
