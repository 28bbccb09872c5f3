"""What compressed experts are worth at equal bytes: every method of the library on models of several origins."""
