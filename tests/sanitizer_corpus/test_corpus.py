"""What the sanitizer finds in the corpus: nothing in the clean cases, each planted bug."""

from importlib import import_module

import pytest
import torch
from triton.runtime.errors import InterpreterError

from minidl.runtime import launch
from minidl.testing import SanitizerError, sanitize
from tests.sanitizer_corpus import KERNELS


@pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer is for the interpreter")
@pytest.mark.unsanitized
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
@pytest.mark.parametrize("kernel", KERNELS)
def test_planted_bugs_are_found_and_clean_cases_are_left_alone(kernel):
    cases, found, gone = import_module(f"tests.sanitizer_corpus.{kernel}").cases, {}, set()
    for case in cases:
        torch.manual_seed(0)
        try:
            with sanitize():
                (case.run if case.expect == "bug" else case.right)()
            found[case.name, case.expect] = False
        except SanitizerError:
            found[case.name, case.expect] = True
        except InterpreterError as error:
            if "Block pointers have been removed" not in str(error):  # by Triton 3.9
                raise
            gone.add(case.name)
    assert found == {(case.name, case.expect): case.expect == "bug" for case in cases if case.name not in gone}
    assert len(found) + len(gone) == len(cases) >= 4
    assert found
