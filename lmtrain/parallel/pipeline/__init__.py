"""Stages that run a schedule's table and send hidden states to one another."""
