"""What a person sees: the terminal, tables, messages, lists of facts."""
