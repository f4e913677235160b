"""Pages that need no other file: what they are drawn and written with. Knows no run, no plan and no verb."""
