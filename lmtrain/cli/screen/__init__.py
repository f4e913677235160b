"""What a person sees: lines, sentences, tables, lists of facts."""
