"""Argument names of torch's functions, methods and layers, from their code or else from their documentation."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

NOT_COUNTED = {"_stacklevel", "args", "self"}


def positional(function: Callable[..., Any]) -> list[str]:
    """The names that can be given by position, of a function of ours or of one of torch's written in Python."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.name not in NOT_COUNTED]


def documented(name: str, function: Any) -> list[list[str]]:
    """The same, of each signature that the documentation of a function begins a line with."""
    found = []
    start = (
        rf"^\s*(?:\.\. (?:function|method):: )?(?:torch\.)?(?:nn\.functional\.)?{re.escape(name)}\((.*?)\)\s*(?:->|$)"
    )
    for match in re.finditer(start, function.__doc__ or "", re.MULTILINE):
        named = [part.split(":")[0].split("=")[0].strip() for part in re.sub(r"\[[^\]]*\]", "", match[1]).split(",")]
        ends = [i for i, part in enumerate(named) if part.startswith(("*", "\\*")) or part in ("", "out")]
        found.append([part for part in named[: min(ends, default=len(named))] if part not in NOT_COUNTED])
    return found


def of_function(name: str) -> list[list[str]]:
    """The signatures of torch's function of a name; none where torch has no function or tells of none."""
    found: list[list[str]] = []
    for home in (functional, torch):
        # What returns indices on demand is dispatched without names.
        function = getattr(home, f"{name}_with_indices", None) or getattr(home, name, None)
        if inspect.isfunction(function):
            found.append(positional(function))
        elif callable(function) and not inspect.isclass(function):
            found += documented(name, function)
    return found


def of_method(name: str) -> list[list[str]]:
    """The signatures of a method of torch's Tensor, without self."""
    method = inspect.getattr_static(torch.Tensor, name, None)
    return [positional(method)] if inspect.isfunction(method) else documented(name, method)


def agree(ours: Callable[..., Any], theirs: list[list[str]], method: bool = False) -> bool:
    """Whether torch's names are there in torch's order, before what minidl adds; a method's first is the tensor."""
    own = positional(ours)
    own = own[1:] if method and own[:1] in (["input"], ["tensor"], ["x"]) else own
    return any(own[: len(names)] == names for names in theirs)
