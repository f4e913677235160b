"""The Python interface: the functions and classes that `import lmtrain` offers, and nothing that commands use."""
