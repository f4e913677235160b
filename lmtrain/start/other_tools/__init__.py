"""Lines and files of settings that were written for other tools: what they are in the words of lmtrain."""
