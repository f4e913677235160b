"""One file per evaluation task; each states its protocol."""
