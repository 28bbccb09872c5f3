"""Signatures of classes whose metaclass takes any arguments, as that of NNX does."""

import inspect


class _OfInit:
    """Gives a class the signature of its `__init__`, and each class that is derived from it its own."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:], return_annotation=owner)


def show_signatures(*classes: type) -> None:
    """Has `help` and `inspect.signature` show what makes these classes, and those derived from them."""
    for one in classes:
        one.__signature__ = _OfInit()  # pyright: ignore[reportAttributeAccessIssue]
