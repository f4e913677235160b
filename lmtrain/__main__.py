"""`python -m lmtrain` and `torchrun -m lmtrain`: the command `lmtrain` where no script of that name is on the path."""

from lmtrain.cli.main import main

if __name__ == "__main__":
    main()
