"""The command line itself: the table of commands, arguments, help, and preparations of a process before JAX."""
