"""One module per command of `windowkv`, or per group of commands."""
