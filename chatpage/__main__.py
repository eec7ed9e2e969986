"""`python -m chatpage` is the `chatpage` command."""

from chatpage.cli import main

if __name__ == "__main__":
    main()
