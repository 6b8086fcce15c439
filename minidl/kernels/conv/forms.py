"""The forms of a convolution, each a module of this folder with the names of `Form`, and what each can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from minidl.kernels.conv import (
    banded,
    banded_grad_weight,
    batch_back,
    batch_grad_weight,
    batch_tiled,
    boxed,
    boxed_grad_weight,
    costs,
    depthwise,
    depthwise_grad_weight,
    few_outputs,
    fft,
    narrow_grad_weight,
    paired_box,
    patches_back,
    pixel_back,
    pixel_choice,
    pixel_grad_weight,
    pixel_tiled,
    product,
    split_box,
    split_grad_weight,
    unfolded_grad_weight,
)
from minidl.kernels.conv.problem import Problem, Tensors, Unsupported
from minidl.kernels.conv.rewrites import REWRITES as REWRITES
from minidl.runtime import launch


class Form(Protocol):
    """The interface of a form's module.

    NAME, DIRECTIONS, FAMILIES  its public name, which variants share; the directions it supports; its tile tables
    """

    __name__: str
    NAME: str

    @property
    def DIRECTIONS(self) -> tuple[str, ...]: ...  # noqa: N802

    @property
    def FAMILIES(self) -> tuple[str, ...]: ...  # noqa: N802

    def able(self, problem: Problem) -> bool | Unsupported:
        """Return True, or the reason why not."""

    def estimate(self, problem: Problem) -> float:
        """Return the microseconds of a problem that it supports, on a GPU."""

    def prepare(self, problem: Problem) -> Any:
        """Return everything that `run` needs except tensors: tiles, grids, records and descriptors."""

    @property
    def run(self) -> Callable[[Any, Tensors], Any]: ...


def _one(problem: Problem) -> float:
    return 1


def _none(problem: Problem) -> int:
    return 0


def _never(problem: Problem, microseconds: float) -> bool:
    return False


class Abilities(NamedTuple):
    """What a form can do beyond `Form`.

    in_place           reads backward weights as they are, if they are `Problem.in_place`
    float8             reads 8-bit values, forward
    added              supports a sum before the activation if M is a multiple of this; 0: none
    overlaps           reads pixels that overlap in memory (`unshuffle`)
    reads_concat_pair  whether it reads two joined tensors in place
    statistics_bands   the number of row bands whose statistics the kernel returns
    programs           the number of programs in the interpreter
    reorders           whether copying `in_place` weights into its order first pays in a launch of these microseconds
    """

    in_place: bool = False
    float8: bool = False
    added: int = 0
    overlaps: bool = False
    reads_concat_pair: Callable[[Problem], bool | int] = _none
    statistics_bands: Callable[[Problem], int] = _none
    programs: Callable[[Problem], float] = _one
    reorders: Callable[[Problem, float], bool] = _never

    def covers(self, problem: Problem) -> bool | Unsupported:
        """Return whether a form with these abilities supports what the problem needs besides its shape."""
        # With other M the sum would be read value by value, and the addresses would spill registers.
        if problem.added and (self.added == 0 or problem.M % self.added):
            return Unsupported(f"a sum, unless with a multiple of {self.added} channels" if self.added else "a sum")
        if problem.dtype.itemsize == 1 and not self.float8:
            return Unsupported("float8")
        return not problem.pitches or self.overlaps or Unsupported("pixels that overlap in memory")


# In the order in which `explain` lists them.
ABILITIES: dict[Form, Abilities] = {
    pixel_tiled: Abilities(
        in_place=True, added=8, programs=pixel_choice.programs, reorders=pixel_choice.pays_to_reorder
    ),
    boxed: Abilities(in_place=True, float8=True, added=16, overlaps=True, reads_concat_pair=boxed.reads_concat_pair),
    batch_tiled: Abilities(in_place=True, float8=True, added=16, programs=costs.outputs),
    paired_box: Abilities(added=8, reads_concat_pair=paired_box.reads_concat_pair),
    split_box: Abilities(overlaps=True),
    banded: Abilities(added=8),
    fft: Abilities(),
    product: Abilities(
        in_place=True, float8=True, added=8, statistics_bands=product.statistics_bands, programs=product.programs
    ),
    patches_back: Abilities(programs=patches_back.programs),
    few_outputs: Abilities(),
    batch_back: Abilities(programs=costs.outputs),
    pixel_back: Abilities(programs=pixel_back.programs),
    depthwise: Abilities(programs=depthwise.programs),
    pixel_grad_weight: Abilities(programs=pixel_choice.programs),
    batch_grad_weight: Abilities(programs=costs.outputs),
    boxed_grad_weight: Abilities(reads_concat_pair=boxed_grad_weight.reads_concat_pair),
    split_grad_weight: Abilities(),
    unfolded_grad_weight: Abilities(programs=pixel_choice.programs),
    banded_grad_weight: Abilities(),
    depthwise_grad_weight: Abilities(programs=narrow_grad_weight.programs),
}
FORMS: tuple[Form, ...] = tuple(ABILITIES)


def abilities(form: Form) -> Abilities:
    """Return what a form can do; nothing more than its interface for a form that is not listed."""
    return ABILITIES.get(form, Abilities())


@contextlib.contextmanager
def among(*modules: Form) -> Iterator[None]:
    """Restrict plans to these form modules within a context; for measurements, as modules may share a name."""
    global FORMS  # noqa: PLW0603
    before, FORMS = FORMS, modules
    launch.forget()
    try:
        yield
    finally:
        FORMS = before
        launch.forget()


def names() -> tuple[str, ...]:
    """Return the names accepted by `form=`."""
    rewrites = [rewrite.name for rewrite in REWRITES if rewrite.name]
    return tuple(dict.fromkeys([*(form.NAME for form in FORMS), *rewrites]))
