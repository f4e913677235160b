"""Pipeline stages that run a schedule's table and exchange hidden states."""
