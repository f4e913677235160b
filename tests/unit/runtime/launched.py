"""The ranks of test_launch: each runs the file that its first argument names."""

import runpy
import sys


def main() -> None:
    runpy.run_path(sys.argv[1], run_name="__main__")


if __name__ == "__main__":
    main()
