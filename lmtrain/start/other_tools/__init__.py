"""A typed line, and lines and files that were written for other tools: what they are in the words of lmtrain."""
