"""Removal of copies: documents that copy other documents, or texts of an evaluation set."""
