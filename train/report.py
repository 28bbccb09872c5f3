"""What is said before training starts."""

import rich.console
import rich.table

from moe_jax.peft import parameter_groups
from moe_jax.train.program import Program


def print_partition(console: rich.console.Console, program: Program) -> None:
    """Prints the parameters by leaf path: how many, which share of all, trained or frozen; and the router's fate."""
    groups = parameter_groups(program.model, program.trainable)
    total = sum(group.size for group in groups)
    trained = sum(group.size for group in groups if group.trainable)
    table = rich.table.Table("parameters", "count", "share", "", title=None, box=None, header_style="bold")
    for column in (1, 2):
        table.columns[column].justify = "right"
    for group in groups:
        share = f"{group.size / total:.2%}"
        table.add_row(group.name, f"{group.size:,}", share, "trained" if group.trainable else "frozen")
    console.print(table, highlight=False)
    console.print(f"trained: {trained:,} of {total:,} parameters ({trained / total:.2%})", highlight=False)
    routers = [group.trainable for group in groups if "/router/" in group.name]
    if routers:
        answer = "yes" if all(routers) else "some" if any(routers) else "no"
        console.print(f"the router is among them: {answer}", highlight=False)
