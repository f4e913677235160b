"""The fixtures of tests that go through the command line; also taken by tests/gpu."""

from tests.cli.harness import sentences as sentences
from tests.cli.harness import toy as toy
