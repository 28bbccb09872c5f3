"""The classes of inputs. Every module holds a tuple `ATTACKS`, and is found without being named anywhere."""
