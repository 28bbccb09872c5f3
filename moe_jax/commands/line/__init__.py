"""The command line itself: the table of commands, arguments, help, and what a process needs before JAX."""
