"""Prints the results of `plan`, `plan --compress`, `plan --platform`, `plan --train` and `plan --propose`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from moe_jax.core.formatting import show_bytes, show_duration
from moe_jax.core.terminal import console_for_tables, table_of_figures

if TYPE_CHECKING:
    from moe_jax.compression.coding.storage import Stored
    from moe_jax.conversion.checkpoint_source import CodesInside
    from moe_jax.models import ModelConfig
    from moe_jax.planning.model_costs import LayerStrategies, ModelPlan, PlannedStrategies, PlannedVision
    from moe_jax.planning.planned_compression import PlannedCompression
    from moe_jax.planning.planned_parts import PlannedParts
    from moe_jax.planning.planned_training import PlannedTraining
    from moe_jax.planning.proposals import Proposal, Proposals


def print_plan(path: Path, config: "ModelConfig", plan: "ModelPlan") -> None:
    """Prints what the model is, and a table of its parameters, bytes and FLOP."""
    tuned, memory = plan.peft, plan.training_bytes_per_chip
    console = console_for_tables()
    moe = config.moe_layers
    kind = f"{len(moe)} of {config.num_layers} layers are MoEs" if moe else f"{config.num_layers} layers, dense"
    sees = "" if config.vision is None else f", sees ({config.vision.family})"
    console.print(f"[bold]{escape(str(path))}[/bold]: {config.family}, d={config.d_model}, {kind}{sees}")
    if moe:
        first = config.moe(moe[0])
        universal = "" if first.universal == "none" else f"; universal FFN: {first.universal}"
        extended = ", extended" if first.extended else ""
        console.print(f"{first.num_experts} experts, {first.top_k} per token, {first.bank.kind}{universal}{extended}")
        if first.perft is not None:
            perft = first.perft
            chosen = "" if perft.top_k is None else f", {perft.top_k} per token"
            console.print(f"PERFT, {perft.variant}: {perft.num_experts} adapters of rank {perft.adapter.rank}{chosen}")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    rows = [
        ("parameters", plan.total_params, ""),
        ("  dense", plan.dense_params, "the dense model, or this one with one expert per MoE and no router"),
        ("  added", plan.added_params, ""),
        ("  routers", plan.router_params, ""),
        ("  experts", plan.expert_params, "kernels or bases and deltas; positions are not parameters"),
        ("active per token", plan.active_params, "norms left out"),
        ("trainable", plan.trainable_params, "all but frozen bases" + (" and the tower" if plan.vision else "")),
    ]
    if plan.universal_params:
        rows.insert(5, ("  universal FFNs", plan.universal_params, "beside the experts"))
    for name, count, note in rows:
        table.add_row(name, f"{count:,}", note)
    if plan.formula_added_params != plan.added_params:
        note = "as DeRS counts" if tuned is None else "as published counts are made: without LoRA, which is merged"
        table.add_row("  added, by formula", f"{plan.formula_added_params:,}", note)
    if tuned is not None:
        note = f"{tuned.active_fraction:.2%} of what is active in the base"
        table.add_row("tuned", f"{tuned.total_params:,}", "adapters, LoRA and the routers that choose among adapters")
        table.add_row("  active per token", f"{tuned.active_params:,}", note)
    table.add_row("bytes", show_bytes(plan.param_bytes), f"in {config.dtype}, positions included")
    flops = f"of a training step per token, in rows of the whole context of {config.max_positions:,} tokens"
    table.add_row("FLOP", f"{plan.train_flops_per_token:,.0f}", flops)
    if plan.vision is not None:
        for row in _vision_rows(config, plan.vision):
            table.add_row(*row)
    if memory is not None:
        parts = f"parameters {show_bytes(memory.params)}, gradients {show_bytes(memory.gradients)}, "
        frozen = f"; what is frozen in {config.dtype}" if plan.trainable_params < plan.total_params else ""
        parts += f"optimizer {show_bytes(memory.optimizer)}; float32, without activations{frozen}"
        table.add_row("training, per chip", show_bytes(memory.total), parts)
    console.print(table)


def print_codes(codes: "CodesInside") -> None:
    """Prints what a quantised checkpoint holds, and what training makes of it."""
    kinds = codes.in_words() if codes.kinds else "as config.json says"
    print(f"the checkpoint is quantised: {kinds}; training starts from decoded weights")
    if codes.partly is not None:
        print(codes.partly)


def _vision_rows(config: "ModelConfig", vision: "PlannedVision") -> list[tuple[str, str, str]]:
    assert config.vision is not None
    tower, sides = config.vision.tower, " x ".join(map(str, config.vision.processing.size))
    run = f"{vision.layers_run} of {tower.num_layers} layers are run"
    steps = ", ".join(config.vision.projector)
    rows = [
        ("tower", f"{vision.tower_params:,}", f"{show_bytes(vision.tower_bytes)}; {tower.family}, {run}"),
        ("projector", f"{vision.projector_params:,}", f"{show_bytes(vision.projector_bytes)}; {steps}"),
        ("tokens per picture", f"{vision.tokens_per_picture:,}", f"of {sides} pixels"),
        ("FLOP per picture", f"{vision.tower_flops + vision.projector_flops:,.0f}", "of tower and projector, forward"),
    ]
    if vision.tower_share is not None:
        many = "a picture" if vision.pictures == 1 else f"{vision.pictures} pictures"
        note = f"of a training step with the tower frozen, in rows of the whole context with {many}"
        rows.append(("  tower's share", f"{vision.tower_share:.1%}", note))
    return rows


def print_compression(planned: "PlannedCompression") -> None:
    """Prints a table of all forms; sizes in MiB, as papers give them."""
    kept = "" if planned.keep is None else f", keep {planned.keep:g}"
    out = console_for_tables(cuts_nothing=True)
    out.print()
    out.print(
        f"{planned.method}{kept}, in {planned.dtype}: experts of layer {planned.layers[0]}, and the model with "
        f"{len(planned.layers)} layers compressed, in MiB; bits per expert weight"
    )
    biases = any(form.layer.biases for form in planned.stored)
    columns = ("values", "places", "row pointers", "centre", *(["biases"] if biases else []), "layer", "model")
    table = table_of_figures("form", *columns, "of the experts", "bits", "")
    for form in planned.stored:
        layer = form.layer
        parts = (layer.values, layer.places, layer.row_pointers, layer.centre, *([layer.biases] if biases else []))
        sizes = map(_mib, (*parts, layer.total, form.model_bytes))
        note = _form_note(form, planned.fewest)
        table.add_row(form.form, *sizes, f"{form.share:.1%}", f"{form.bits_per_weight:.2f}", note)
    out.print(table)


def print_parts(planned: "PlannedParts") -> None:
    """Prints a table of the bytes of every part, and the budgets that there is a choice for."""
    from moe_jax.planning.planned_parts import PARTS

    out = console_for_tables(cuts_nothing=True)
    out.print()
    out.print(f"{planned.method} of {planned.of}, in {planned.dtype}: bytes by part, and bits per weight of the model")
    parts = [part for part in PARTS if any(part in one.parts for one in planned.sizes)]
    table = table_of_figures("", *parts, "model", "bytes", "bits")
    for one in planned.sizes:
        sizes = (show_bytes(one.parts.get(part, 0)) for part in parts)
        table.add_row(one.way, *sizes, show_bytes(one.total), f"{one.total:,}", f"{one.bits_per_weight:.3f}")
    out.print(table)
    budgets = [one.budget for one in planned.sizes if one.budget is not None]
    if budgets:
        what = "the experts" if planned.of == "experts" else "the model"
        out.print(f"--target-bytes of {what}: from {budgets[0]:,}; above {budgets[-1]:,} there is nothing to gain")


def _form_note(form: "Stored", fewest: str | None) -> str:
    from moe_jax.compression.coding.storage import FULL

    if form.form == FULL.name:
        return "not compressed"
    if form.form == fewest:
        return "fewest bytes for sparse residuals"
    return "" if form.written else "to compare with, never written"


def _mib(count: int) -> str:
    """Returns a number of MiB, with two digits after the point if it is small, as the ends of rows are."""
    return f"{count / 2**20:,.{1 if count >= 10 * 2**20 else 2}f}" if count else "-"


def print_strategies(planned: "PlannedStrategies") -> None:
    """Prints a table for every kind of experts, in microseconds."""
    out = console_for_tables()
    peak, bandwidth = planned.operations_per_second, planned.bytes_per_second
    out.print()
    out.print(
        f"on {planned.platform}: {peak / 1e12:.4g} TFLOP/s in {planned.dtype}, {bandwidth / 1e9:.4g} GB/s, "
        f"{peak / bandwidth:.0f} operations per byte ({planned.source})",
        soft_wrap=True,
    )
    for layer in planned.layers:
        out.print(_strategies_title(layer), soft_wrap=True)
        out.print(_strategies_table(layer))
    for experts, count in planned.left_out.items():
        out.print(f"{count} layers of {experts}: no choice between strategies")
    if not planned.layers and not planned.left_out:
        out.print("no layer has experts: nothing to choose")


def _strategies_title(layer: "LayerStrategies") -> str:
    chosen = layer.times[layer.chosen]
    why = f"takes least, bound by {chosen.bound}" if len(layer.times) > 1 else f"the only way, bound by {chosen.bound}"
    count = f"{len(layer.layers)} layer{'s' if len(layer.layers) > 1 else ''}"
    load = f"{layer.num_experts} {layer.experts}, top-{layer.top_k}, {layer.use}, {layer.tokens:,} tokens on a device"
    return f"{count} of {load}: {layer.chosen} ({why})"


def _strategies_table(layer: "LayerStrategies") -> Table:
    columns = ("products, µs", "bytes, µs", "making, µs", "in all, µs")
    table = table_of_figures("  strategy", *columns, "bound by", words=("bound by",))
    for name, time in layer.times.items():
        numbers = (time.products, time.bytes, time.making, time.total)
        mark = "*" if name == layer.chosen else " "
        table.add_row(f"{mark} {name}", *(f"{number:,.1f}" for number in numbers), time.bound)
    return table


def print_training(planned: "PlannedTraining", *, of_recipe: bool = True) -> None:
    """Prints a table of bytes, whether they fit, and the time; `of_recipe`: training is by a recipe of the user's."""
    out = console_for_tables()
    axes = " x ".join(f"{axis} {size}" for axis, size in planned.mesh.items() if size > 1)
    many = f", {planned.devices} devices ({axes}), of which each holds:" if planned.devices > 1 else ":"
    out.print()
    out.print(f"training on {escape(planned.platform)}{many}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for item in planned.items:
        table.add_row(f"  {item.name}", show_bytes(item.bytes), escape(item.note))
    of = "" if planned.memory is None else f"{planned.total / planned.memory:.0%} of {show_bytes(planned.memory)}"
    table.add_row("in all", show_bytes(planned.total), of)
    out.print(table)
    if planned.fits is False:
        settings = "model.remat, train.accumulation, model.param_dtype, mesh, optimizer"
        advice = f"see {settings}" if of_recipe else "see --mesh, --tokens, --optimizer; a recipe (--train) says more"
        out.print(f"[bold red]does not fit[/]: {advice}", soft_wrap=True)
    elif planned.tight:
        out.print("[bold yellow]warning[/]: more than 90% of the memory; leave some, for compilers differ")
    if planned.sent is None:
        _print_time(planned)
    else:
        _print_estimate(planned)


def print_proposals(found: "Proposals", command: Sequence[str], overrides: Sequence[str] = ()) -> None:
    """Prints a table of proposals, and the command that takes the first: `command` with its `overrides` and more.

    Where nothing fits, prints what comes nearest and where something fits.
    """
    out = console_for_tables()
    of = f"{found.devices} chips of {show_bytes(found.memory)}"
    out.print()
    if found.nearest is None and not found.proposals:
        out.print(
            f"[bold red]no mesh[/] of the {found.devices} chips of {found.platform} divides the model and the batch: "
            "see train.batch_size, and the numbers of heads and experts",
            soft_wrap=True,
        )
    elif found.nearest is not None:
        missing = show_bytes(found.nearest.bytes - found.memory)
        out.print(f"[bold red]nothing fits[/] {found.platform}, {of}; the nearest lacks {missing}:", soft_wrap=True)
        out.print(_proposals_table([found.nearest], found.memory))
    else:
        out.print(f"training on {found.platform}, {of}, the best of {found.meshes} meshes first:", soft_wrap=True)
        out.print(_proposals_table(found.proposals, found.memory))
        out.print(
            "least times, at the peaks of data sheets, and bytes from shapes; nothing was compiled: "
            f"train --compile-only --topology {found.platform} says what the compiler makes of it",
            soft_wrap=True,
        )
        if all(one.tight for one in found.proposals):
            out.print("[bold yellow]warning[/]: all take more than 90% of the memory; leave some, for compilers differ")
    if found.on_smallest is not None:
        out.print(f"the smallest larger slice with room is {found.smallest_platform}:", soft_wrap=True)
        out.print(_proposals_table([found.on_smallest], found.memory))
    elif not found.proposals:
        out.print("nothing fits a larger slice either")
    first = found.proposals[0] if found.proposals else found.on_smallest
    if first is not None:
        changed = {setting.partition("=")[0] for setting in first.settings}
        settings = [*(one for one in overrides if one.partition("=")[0].strip() not in changed), *first.settings]
        out.print("to take the first:" if found.proposals else "to train there:")
        out.print(
            f"  {shlex.join([*command, *(['--set', *settings] if settings else [])])}", soft_wrap=True, markup=False
        )


def _proposals_table(proposals: "Sequence[Proposal]", memory: int) -> Table:
    columns = ("mesh", "remat", "microbatches", "parameters, moments", "a chip", "of", "step, at least", "bound by")
    words = ("mesh", "remat", "parameters, moments", "bound by")
    table = table_of_figures("", *columns, "links", "tokens/s", "hours", words=words)
    for number, one in enumerate(proposals, 1):
        mesh = " x ".join(f"{axis} {size}" for axis, size in one.mesh.items() if size > 1) or "one chip"
        table.add_row(
            str(number),
            mesh,
            one.remat,
            str(one.accumulation),
            f"{one.param_dtype}, {one.moments}",
            show_bytes(one.bytes),
            f"{one.bytes / memory:.0%}",
            _seconds(one.seconds),
            one.bound,
            "-" if one.links is None else _seconds(one.links),
            f"{one.tokens_per_second:,.0f}",
            f"{one.run_seconds / 3600:,.3g}",
        )
    return table


def _print_time(planned: "PlannedTraining") -> None:
    out, time = console_for_tables(), planned.time
    if time is None or planned.run_seconds is None:
        out.print("time: not known, for there is no data sheet of this device in moe_jax.core.data_sheets")
        return
    least, most = ("at least ", "at most ") if planned.is_least else ("about ", "about ")
    parts = ""
    if time.products is not None and time.bytes is not None:
        parts = f" ({_seconds(time.products)} of products, {_seconds(time.bytes)} of memory)"
    out.print(
        f"time: {least}{_seconds(time.seconds)} a step{parts}, {most}{time.tokens_per_second:,.0f} tokens/s; "
        f"{_whole_run(planned)}",
        soft_wrap=True,
    )
    out.print(f"  {_rates(planned)}", soft_wrap=True)


def _whole_run(planned: "PlannedTraining") -> str:
    """Returns the time of all steps, their tokens, and for accelerators the hours of all devices together."""
    assert planned.run_seconds is not None and planned.run_tokens is not None
    least, seconds = "at least " if planned.is_least else "about ", planned.run_seconds
    parts = [_seconds(seconds) if seconds < 60 else show_duration(seconds), f"{planned.run_tokens:,} tokens"]
    if planned.is_least:
        parts.append(f"{seconds * planned.devices / 3600:,.3g} device hours")
    return f"{planned.steps:,} step{'s' * (planned.steps != 1)}: {least}{', '.join(parts)}"


def _rates(planned: "PlannedTraining") -> str:
    """Returns the source of the rates, and the peaks that it gives."""
    speeds = planned.speeds or {}
    told = [f"{speeds['products'] / 1e12:.4g} TFLOP/s"] if "products" in speeds else []
    told += [f"{name} {speed / 1e9:,.4g} GB/s" for name, speed in speeds.items() if name != "products"]
    return f"{', '.join(told)}: {planned.rates}" if told else f"{planned.rates}"


def _print_estimate(planned: "PlannedTraining") -> None:
    out, roofline = console_for_tables(), planned.roofline
    from moe_jax.planning.planned_training import TEACHER_ITEM

    assert planned.sent is not None and planned.model_flops is not None and roofline is not None
    sent = ", ".join(f"{kind} {one.runs} x, {show_bytes(one.sent)}" for kind, one in planned.sent.items())
    out.print(f"sent by each in a step, as in a ring: {sent or 'nothing'}", soft_wrap=True)
    if any(item.name == TEACHER_ITEM for item in planned.items):
        out.print("the forward pass of the teacher is neither in what is sent nor in the estimate", soft_wrap=True)
    links = "links not known" if roofline.links is None else f"links {_seconds(roofline.links)}"
    out.print(
        f"estimate, at the peaks of data sheets: at least {_seconds(roofline.seconds)} a step, at most "
        f"{roofline.utilisation:.0%} utilisation of {planned.model_flops:.3g} FLOP, bound by {roofline.bound} (matrix "
        f"units {_seconds(roofline.matrix)}, memory {_seconds(roofline.memory)}, {links})",
        soft_wrap=True,
    )
    out.print(f"  {_whole_run(planned)}", soft_wrap=True)
    out.print(f"  {_rates(planned)}", soft_wrap=True)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
