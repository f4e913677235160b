"""Tests of lmtrain/plan."""
