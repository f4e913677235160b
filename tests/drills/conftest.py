"""The dataset that drills train on, made once."""

from tests.cli.harness import toy as toy
