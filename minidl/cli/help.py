"""The layout of --help: options grouped by subject, in two columns that fit a terminal of 80 characters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import typer

_NAMES = 26  # columns of names; longer ones have a line of their own
_OTHERS = "Options"
_HYPHEN = "\u2011"  # no line is broken at it
_SUBJECTS = {
    "Data": "data text_column label_column target task ignore missing numbers size validation test val_split "
    "test_split file samples evaluator",
    "Features": "features analyzer ngrams token_pattern nfc min_df max_features",
    "Model": "model init freeze unfreeze unfreeze_lr stem hidden latent width dropout precision",
    "Augmentation": "normalize shift flip crop mixup cutmix progressive",
    "Optimization": "epochs batch_size lr optimizer schedule warmup weight_decay label_smoothing balance patience lazy "
    "ema seed",
    "Output": "out format top terms json html resume overwrite plots quiet",
    "Devices and speed": "device devices timeout shards sync_batch_norm zero workers cache capture",
    "Profiling": "profile trace",
}
_OF_COMMANDS = {
    "bench": {
        "Output": "json plot show list",
        "Drawn shapes": "drawn seed of dtype from regret",
        "Drawn shapes, networks and in-torch": "minutes part",
        "Networks and in-torch": "against",
    },
    "doctor": {"With --compile": "m only brief details json"},
    "generate": {
        "Images": "seeds count grid truncation interpolate steps latents",
        "Model": "model",
        "Output": "out format overwrite quiet",
        "Devices and speed": "precision device devices batch_size workers",
    },
    "tune": {"Estimates": "estimates seed", "Output": "out write dry_run list json plot"},
}  # fmt: skip


class PlainHelp:
    """Let a command or a group show its help in this layout."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return --help without a type, as the other flags have none."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help to the formatter."""
        _write(self, ctx, formatter)


def _write(command: Any, ctx: Any, formatter: Any) -> None:
    """Write the help of a command or a group: usage, description, arguments, options by subject, examples."""
    formatter.write_usage(ctx.command_path, " ".join(["[OPTIONS]", *_operands(command, ctx)]))
    formatter.write_paragraph()
    formatter.write_text(_unbroken(command.help or ""))
    for title, rows in _sections(command, ctx):
        with formatter.section(typer.style(title, bold=True)):
            formatter.write_dl([(name, _unbroken(text)) for name, text in rows], col_max=_NAMES)
    title, *lines = (command.epilog or "").split("\n\n")
    if lines:
        with formatter.section(typer.style(title.rstrip(":"), bold=True)):
            formatter.write("".join(f"  {line}\n" for line in lines))
    formatter.buffer = [text.replace(_HYPHEN, "-") for text in formatter.buffer]


def _unbroken(text: str) -> str:
    """Keep names with hyphens, such as --batch-size, in one line."""
    return text.replace("-", _HYPHEN)


def _operands(command: Any, ctx: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        yield "COMMAND [ARGS]..."
    for param in command.get_params(ctx):
        if param.param_type_name == "argument":
            yield (param.metavar if param.required else f"[{param.metavar}]") + "..." * (param.nargs < 0)


def _sections(command: Any, ctx: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    arguments = [param for param in params if param.param_type_name == "argument"]
    if arguments:
        yield "Arguments", [(param.metavar + "..." * (param.nargs < 0), param.help or "") for param in arguments]
    if hasattr(command, "commands"):
        commands = ((name, command.get_command(ctx, name)) for name in command.list_commands(ctx))
        yield "Commands", [(name, (each.help or "").partition("\n")[0]) for name, each in commands]
    subjects = {**_OF_COMMANDS.get(command.name, {}), **_SUBJECTS}
    subjects |= _OF_COMMANDS.get(command.name, {})
    for title, names in [*((title, names.split()) for title, names in subjects.items()), (_OTHERS, None)]:
        chosen = [
            param
            for param in params
            if param.param_type_name == "option" and _subject(param.name.rstrip("_"), subjects) == title
        ]
        if chosen and names is not None:
            chosen.sort(key=lambda param: (not param.required, names.index(param.name.rstrip("_"))))
        if chosen:
            yield title, [_row(param) for param in chosen]


def _subject(name: str, subjects: dict[str, str]) -> str:
    return next((title for title, names in subjects.items() if name in names.split()), _OTHERS)


def _row(param: Any) -> tuple[str, str]:
    names: Sequence[str] = [*param.opts, *param.secondary_opts]
    value = "" if param.is_flag else param.metavar or ""
    text = (param.help or "") + (" Required." if param.required else "")
    return " ".join(filter(None, [", ".join(names), value])), text
