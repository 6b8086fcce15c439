"""The sanitizer finds each planted bug at its line, and nothing in kernels that are right."""

import inspect
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from minidl import ops
from minidl.runtime import launch
from minidl.tensors import Tensor
from minidl.testing import GuardedAllocations, SanitizerError, sanitize
from tests.testing.sanitizer import kernels

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer is for the interpreter")

x10 = torch.arange(10.0)


def bins():
    """Eight numbers of bins, each twice."""
    return torch.arange(8, dtype=torch.int32) // 2


def found_by(action, **options):
    """The findings of what an action launches."""

    def run():
        with sanitize(**options):
            action()

    with pytest.raises(SanitizerError) as raised:
        run()
    return raised.value.findings


def found(kernel, grid, *args, **meta):
    """The findings of one launch."""
    return found_by(lambda: kernel[grid](*args, **meta))


def lines_of_bugs(kernel):
    """The lines of a kernel's source, and of the functions in its file, that carry a bug's mark."""
    source, first = inspect.getsourcelines(kernel.fn)
    return [first + i for i, line in enumerate(source) if line.rstrip().endswith("# BUG")]


PLANTED = {
    "a read past the end": (
        "reads_one_too_many", (2,), (x10, torch.zeros(10), 10), {"BLOCK": 8},
        "out-of-bounds read", "load of 1 past the end of x (float32 tensor of shape [10])", (1, 0, 0), None,
    ),
    "a read before the start": (
        "reads_before", (2,), (x10, torch.zeros(10), 10), {"BLOCK": 8},
        "out-of-bounds read", "load of 1 before the start of x", (0, 0, 0), None,
    ),
    "a write past the end": (
        "writes_one_too_many", (2,), (x10, torch.zeros(10), 10), {"BLOCK": 8},
        "out-of-bounds write", "store of 1 past the end of out", (1, 0, 0), None,
    ),
    "a masked load without other": (
        "sums_without_other", (1,), (x10, torch.zeros(1), 10), {"BLOCK": 16},
        "missing other", "element [0] of out (float32 tensor of shape [1]) gets a lane that the load at",
        (0, 0, 0), (0,),
    ),
    "two programs that write one element": (
        "all_write_the_first", (2,), (torch.arange(16.0), torch.zeros(3)), {"BLOCK": 8},
        "write race", "element [0] of out (float32 tensor of shape [3]), which program (0, 0, 0) wrote too",
        (1, 0, 0), (0,),
    ),
    "a program that writes a byte of another's word": (
        "second_writes_a_byte_of_a_word", (2,), (torch.zeros(2, dtype=torch.int32),), {},
        "write race", "which program (0, 0, 0) wrote too", (1, 0, 0), (1,),
    ),
    "a read of what another program wrote": (
        "others_read_what_the_first_wrote", (4,), (torch.ones(4), torch.zeros(4)), {},
        "read race", "element [0] of out (float32 tensor of shape [4]), which program (0, 0, 0) wrote", (1, 0, 0), (0,),
    ),
    "a write of what another program read": (
        "first_reads_what_others_write", (3,), (torch.ones(4), torch.zeros(4)), {},
        "read race", "element [1] of out (float32 tensor of shape [4]), which program (0, 0, 0) read before",
        (1, 0, 0), (1,),
    ),
    "two lanes that write one element": (
        "lanes_meet", (1,), (torch.zeros(8, dtype=torch.int32),), {"BLOCK": 16},
        "write race", "element [0] of out (int32 tensor of shape [8]) is written by two lanes with different values",
        (0, 0, 0), (0,),
    ),
    "lanes that read what others wrote": (
        "reads_back_as_a_row", (1,), (torch.zeros(16), torch.zeros(16)), {"SIZE": 4},
        "read race", "element [0] of x (float32 tensor of shape [16]), which another lane of the program stored",
        (0, 0, 0), (0,),
    ),
    "lanes that read what others added to": (
        "counts_then_reads", (1,), (bins(), torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)),
        {"SIZE": 8, "BINS": 4, "BARRIER": False},
        "read race", "which another lane of the program changed by an atomic operation", (0, 0, 0), (0,),
    ),
    "lanes that add to what others wrote": (
        "clears_then_counts", (1,), (bins(), torch.ones(4, dtype=torch.int32)), {"SIZE": 8, "BINS": 4},
        "write race", "which another lane of the program stored", (0, 0, 0), (0,),
    ),
    "a word at an odd address": (
        "reads_by_halves", (1,), (torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)), {},
        "misaligned access", "its address is no multiple of 4 bytes", (0, 0, 0), (0,),
    ),
    "an atomic operation past the end": (
        "counts_beyond", (1,), (torch.zeros(3, dtype=torch.int32), 3), {},
        "out-of-bounds write", "atomic of 1 past the end of count", (0, 0, 0), None,
    ),
    "programs that meet without order": (
        "last_adds_all_relaxed", (4,),
        (torch.ones(4), torch.zeros(4), torch.zeros(1, dtype=torch.int32), torch.zeros(1)), {"SIZE": 4},
        "read race", "element [0] of parts (float32 tensor of shape [4]), which program (0, 0, 0) wrote",
        (3, 0, 0), (0,),
    ),
    "a plain write before another program's atomic operation": (
        "first_writes_what_all_add_to", (3,), (torch.ones(1),), {},
        "write race", "element [0] of out (float32 tensor of shape [1]), which program (0, 0, 0) wrote without",
        (1, 0, 0), (0,),
    ),
    "a plain read of what another program added": (
        "others_read_what_the_first_added", (3,), (torch.ones(1), torch.zeros(3)), {},
        "read race", "which program (0, 0, 0) changed by an atomic operation", (1, 0, 0), (0,),
    ),
    "a plain read of what the program itself added to last": (
        "second_reads_what_all_added", (2,), (torch.ones(1), torch.zeros(1)), {},
        "read race", "which several programs changed by an atomic operation", (1, 0, 0), (0,),
    ),
    "a write of what programs read that were not met": (
        "second_meets_only_the_first", (2, 4),
        (torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.zeros(4)), {},
        "read race", "element [0] of x (float32 tensor of shape [1]), which several programs read before",
        (1, 0, 0), (0,),
    ),
    "a word that ends in a gap": (
        "reads_two_halves", (1,), (torch.ones(8, dtype=torch.int8)[::2], torch.zeros(1, dtype=torch.int16)), {},
        "out-of-bounds read", "load of element [0] of x (int8 tensor of shape [4])", (0, 0, 0), None,
    ),
    "a box beyond the tensor": (
        "reads_boxes", (1,), (torch.zeros(7, 8), torch.zeros(8, 8), 8, 8), {"BLOCK": 16},
        "out-of-bounds read", "load of 1 past the end of x (float32 tensor of shape [7, 8])", (0, 0, 0), None,
    ),
    "a box stored beyond the tensor": (
        "writes_boxes", (1,), (torch.zeros(1), torch.zeros(7, 8), 8, 8), {"BLOCK": 16},
        "out-of-bounds write", "store of 1 past the end of out (float32 tensor of shape [7, 8])", (0, 0, 0), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "grid", "args", "meta", "kind", "what", "program", "index"), PLANTED.values(), ids=PLANTED
)
def test_planted_bugs_are_found(name, grid, args, meta, kind, what, program, index):
    kernel = getattr(kernels, name)
    (finding,) = found(kernel, grid, *args, **meta)
    assert finding.kind == kind
    assert what in finding.what
    assert (finding.kernel, finding.program, finding.index) == (name, program, index)
    assert Path(finding.place.file).name == "kernels.py"
    assert [finding.place.line] == lines_of_bugs(kernel)
    assert finding.place.text in inspect.getsource(kernel.fn)


def test_a_read_of_memory_that_nothing_has_written():
    def half_written():
        x = torch.empty(2, 5)
        x[1] = 1.0
        kernels.copies[(1,)](x, torch.zeros(10), 10, BLOCK=16)

    (finding,) = found_by(half_written)
    assert (finding.kind, finding.index, finding.elements) == ("read of unwritten memory", (0, 0), 5)


def test_the_line_is_that_of_the_function_which_a_kernel_calls():
    (finding,) = found(kernels.calls, (1,), torch.ones(5), torch.zeros(1))
    assert finding.kernel == "calls"
    assert [finding.place.line] == lines_of_bugs(kernels.doubled)


def test_gaps_between_the_rows_of_a_view_are_outside():
    wide = torch.arange(24.0).reshape(4, 6)
    kernels.copies_rows[(1,)](wide[:, :4], torch.zeros(16), 4, 4, 6, BLOCK=8)
    (finding,) = found(kernels.copies_rows, (1,), wide[:, :4], torch.zeros(20), 4, 5, 6, BLOCK=8)
    assert finding.what == "load of an element in a gap between rows of x (float32 tensor of shape [4, 4])"
    assert finding.elements == 4  # the last row's lies past the end, which counts at the same line


def test_an_address_that_was_read_from_memory_is_looked_up():
    x, out = torch.arange(4.0), torch.zeros(1)
    table = torch.tensor([x.data_ptr()])
    with sanitize():
        kernels.follows[(1,)](table, out, 3)
    assert out.item() == 3
    (finding,) = found(kernels.follows, (1,), table, out, 10**9)
    assert (finding.kind, finding.tensor) == ("out-of-bounds read", "memory that no argument names")
    assert [finding.place.line] == lines_of_bugs(kernels.follows)


def test_a_descriptor_of_the_host():
    x = torch.arange(64.0).reshape(8, 8)
    box = TensorDescriptor.from_tensor(x, [8, 8])
    with sanitize() as sanitizer:
        descriptor_copy(box, torch.zeros(8, 8))
    assert sanitizer.findings == []


def descriptor_copy(box, out):
    from tests.testing.sanitizer.boxes import copies_box

    copies_box[(1,)](box, out, SIZE=8)
    assert torch.equal(out, torch.arange(64.0).reshape(8, 8))


RIGHT = {
    "a kernel with masks": ("add", (3,), lambda: (x10, x10, torch.empty(10), 10), {"BLOCK": 4}),
    "masked lanes that are not kept": ("keeps_masked_lanes", (1,), lambda: (x10, torch.empty(11), 10), {"BLOCK": 16}),
    "an other of 0 for a single element": ("copies_one", (1,), lambda: (torch.ones(1), torch.empty(1), 0), {}),
    "lanes that write the same": ("lanes_agree", (1,), lambda: (torch.empty(8, dtype=torch.int32),), {"BLOCK": 16}),
    "lanes that change the shape": ("doubles_in_place_as_a_matrix", (1,), lambda: (torch.ones(16),), {"SIZE": 4}),
    "lanes that add, then meet at a barrier": (
        "counts_then_reads", (1,),
        lambda: (bins(), torch.zeros(4, dtype=torch.int32), torch.empty(4, dtype=torch.int32)),
        {"SIZE": 8, "BINS": 4, "BARRIER": True},
    ),
    "programs that meet at an atomic": (
        "last_adds_all", (4,),
        lambda: (torch.ones(4), torch.empty(4), torch.zeros(1, dtype=torch.int32), torch.empty(1)), {"SIZE": 4},
    ),
    "programs that take turns in groups": (
        "adds_rows_in_groups", (8,),
        lambda: (torch.ones(8, 16), torch.empty(2, 16), torch.zeros(4, dtype=torch.int32)), {"GROUPS": 2, "BLOCK": 16},
    ),
    "programs that add in groups": (
        "last_of_a_group_reads_what_the_group_added", (8,),
        lambda: (torch.ones(8), torch.zeros(2), torch.zeros(2, dtype=torch.int32), torch.empty(2)),
        {"GROUPS": 2, "SIZE": 4},
    ),
    "programs that store the same and read it": (
        "all_store_the_same_and_read_their_own", (3,),
        lambda: (torch.empty(16, dtype=torch.int32), torch.empty(48, dtype=torch.int32)), {"BLOCK": 16},
    ),
    "an expanded tensor": ("copies", (1,), lambda: (torch.ones(1).expand(10), torch.empty(10), 1), {"BLOCK": 16}),
    "a box that ends beyond the tensor": (
        "reads_boxes", (1,), lambda: (torch.ones(7, 8), torch.empty(7, 8), 7, 8), {"BLOCK": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "grid", "args", "meta"), RIGHT.values(), ids=RIGHT)
def test_right_kernels_are_left_alone(name, grid, args, meta):
    with sanitize() as sanitizer:
        given = args()
        getattr(kernels, name)[grid](*given, **meta)
    assert sanitizer.findings == []
    assert not any(torch.isnan(t).any() for t in given if isinstance(t, torch.Tensor))


FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEEN = (*FLOATS, torch.int32, torch.int64)


@pytest.mark.parametrize(
    ("kernel", "dtype", "stored"),
    [
        *(("sums_without_other", dtype, dtype) for dtype in SEEN),
        *(("copies_without_other", dtype, stored) for dtype in SEEN for stored in SEEN),
        *(("adds_without_other", dtype, dtype) for dtype in SEEN if dtype != torch.bfloat16),
        *(("converts_without_other", dtype, stored) for dtype in FLOATS for stored in FLOATS),
    ],
)
def test_missing_other_is_seen_in_every_type(kernel, dtype, stored):
    kernel = getattr(kernels, kernel)
    (finding,) = found(kernel, (1,), torch.ones(10, dtype=dtype), torch.zeros(16, dtype=stored), 10, BLOCK=16)
    assert (finding.kind, [finding.place.line]) == ("missing other", lines_of_bugs(kernel))


@pytest.mark.parametrize("dtype", SEEN)
@pytest.mark.parametrize("how", ["sum", "max", "min", "argmax"])
def test_missing_other_is_seen_through_reductions(how, dtype):
    kernel, out = kernels.reduces_without_other, torch.zeros(1, dtype=torch.int32 if how == "argmax" else dtype)
    (finding,) = found(kernel, (1,), torch.ones(10, dtype=dtype), out, 10, how, BLOCK=16)
    assert (finding.kind, [finding.place.line]) == ("missing other", lines_of_bugs(kernel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["exp", "log", "sin", "sigmoid", "maximum", "clamp"])
def test_missing_other_is_seen_through_functions(how, dtype):
    x, out = torch.ones(10, dtype=dtype), torch.zeros(16, dtype=dtype)
    (finding,) = found(kernels.computes_without_other, (1,), x, out, 10, how, BLOCK=16)
    assert (finding.kind, finding.elements) == ("missing other", 6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_missing_other_is_seen_through_products(dtype):
    kernel, x = kernels.multiplies_without_other, torch.ones(16, 16, dtype=dtype)
    out = torch.zeros(16, 16, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    (finding,) = found(kernel, (1,), x, x, out, 12, BLOCK=16)
    assert (finding.kind, finding.elements) == ("missing other", 256)
    assert [finding.place.line] == lines_of_bugs(kernel)


@pytest.mark.skipif(not hasattr(interpreter, "BlockPointerHandle"), reason="this Triton has no block pointers")
@pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated")
def test_missing_padding_is_seen_after_a_load_with_other():
    kernel = kernels.reads_a_block_without_padding
    (finding,) = found(kernel, (1,), torch.ones(10), torch.zeros(16), 10, BLOCK=16)
    assert (finding.kind, [finding.place.line]) == ("missing other", lines_of_bugs(kernel))


def test_addresses_that_a_kernel_stores_are_those_of_its_tensors():
    x, y, table = torch.ones(4), torch.ones(4), torch.zeros(2, dtype=torch.int64)
    with sanitize():
        kernels.writes_addresses[(1,)](x, y, table)
        kernels.follows[(1,)](table, torch.zeros(1), 3)
    assert table.tolist() == [x.data_ptr(), x.data_ptr() - y.data_ptr()]


def in_a_thread(tensor):
    thread = threading.Thread(target=tensor.fill_, args=(1,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.fill_(1),
        lambda t: t.copy_(torch.ones(10)),
        lambda t: t.__setitem__(slice(None), 1),
        lambda t: t.__setitem__(torch.arange(10), 1),
        lambda t: t.view(2, 5).zero_(),
        lambda t: torch.add(torch.ones(10), 1, out=t),
        lambda t: t.numpy().fill(1),
        lambda t: np.asarray(t).fill(1),
        lambda t: t.__iadd__(1),
        lambda t: torch._foreach_zero_([t]),
        lambda t: kernels.copies[(1,)](torch.ones(10), t, 10, BLOCK=16),
        torch.nn.init.uniform_,
        lambda t: torch.nn.functional.relu(t, inplace=True),
        lambda t: t.untyped_storage().copy_(torch.ones(10).untyped_storage()),
        lambda t: torch.ops.aten.fill_(t, 1),
        in_a_thread,
    ],
    ids=[
        "fill_",
        "copy_",
        "slice",
        "index",
        "view",
        "out",
        "numpy",
        "asarray",
        "augmented",
        "foreach",
        "kernel",
        "init",
        "relu",
        "storage",
        "aten",
        "thread",
    ],
)
def test_what_torch_or_a_kernel_writes_counts_as_written(write):
    with sanitize():
        x = torch.empty(10)
        write(x)
        kernels.copies[(1,)](x, torch.empty(10), 10, BLOCK=16)


def test_memory_that_is_used_again_is_as_new():
    with sanitize():
        for _ in range(50):
            del_me = torch.empty(1000)
            address = del_me.data_ptr()
            del del_me
            x = torch.ones(1000)
            if x.data_ptr() == address:
                break
        else:
            pytest.skip("torch never used the memory again")
        kernels.copies[(1,)](x, torch.empty(1000), 1000, BLOCK=1024)


def test_memory_that_resizing_frees_is_as_new():
    with sanitize():
        moved = torch.empty(1000)
        moved.resize_(100_000)
        for x in [torch.ones(1000) for _ in range(50)]:
            kernels.copies[(1,)](x, torch.zeros(1000), 1000, BLOCK=1024)


def test_what_resizing_adds_is_unwritten():
    x = torch.zeros(4)
    with sanitize():
        x.resize_(16)
        kernels.copies[(1,)](x, torch.zeros(4), 4, BLOCK=4)
        x[4:12] = 1.0
        kernels.copies[(1,)](x, torch.zeros(12), 12, BLOCK=16)
    (finding,) = found_by(lambda: kernels.copies[(1,)](x.resize_(20_000), torch.zeros(20_000), 20_000, BLOCK=32768))
    assert (finding.kind, finding.elements) == ("read of unwritten memory", 20_000 - 16)


def test_the_parameters_of_a_module_are_written():
    with sanitize():
        kernels.copies[(1,)](torch.nn.Linear(2, 5).weight.data, torch.zeros(10), 10, BLOCK=16)


@pytest.mark.parametrize(
    "make",
    [lambda: torch.empty(10, requires_grad=True), lambda: torch.nn.Parameter(torch.empty(10))],
    ids=["requires_grad", "parameter"],
)
def test_unwritten_parameters_are_seen(make):
    (finding,) = found_by(lambda: kernels.copies[(1,)](make(), torch.zeros(10), 10, BLOCK=16))
    assert (finding.kind, finding.elements) == ("read of unwritten memory", 10)


def test_memory_inside_guards_is_watched_too():
    def unwritten():
        with GuardedAllocations():
            kernels.copies[(1,)](torch.empty(10), torch.empty(10), 10, BLOCK=16)

    (finding,) = found_by(unwritten)
    assert (finding.kind, finding.elements) == ("read of unwritten memory", 10)


def test_accesses_out_of_bounds_are_left_out():
    memory = torch.zeros(12)
    found(kernels.writes_one_too_many, (2,), x10, memory[:10], 10, BLOCK=8)
    assert torch.equal(memory, torch.cat([x10, torch.zeros(2)]))


def test_findings_are_counted_and_kept_in_order():
    def twice():
        for _ in range(2):
            kernels.reads_one_too_many[(2,)](x10, torch.zeros(10), 10, BLOCK=8)
        kernels.all_write_the_first[(2,)](torch.arange(16.0), torch.zeros(3), BLOCK=8)

    findings = found_by(twice)
    assert [(f.kind, f.elements) for f in findings] == [("out-of-bounds read", 2), ("write race", 1)]
    assert str(SanitizerError(findings)).startswith("the sanitizer found 2 bugs in kernels:\nout-of-bounds read in")
    assert "(2 accesses in 1 program)" in str(findings[0])


def test_stop_raises_at_the_first_bug_and_later_launches_work():
    def two_bugs():
        kernels.reads_one_too_many[(2,)](x10, torch.zeros(10), 10, BLOCK=8)
        pytest.fail("went on")

    assert len(found_by(two_bugs, stop=True)) == 1
    out = torch.zeros(10)
    kernels.add[(3,)](x10, x10, out, 10, BLOCK=4)
    assert torch.equal(out, 2 * x10)


def test_an_error_of_the_program_is_not_hidden():
    def bug_and_error():
        with sanitize():
            kernels.reads_one_too_many[(2,)](x10, torch.zeros(10), 10, BLOCK=8)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), sanitize():
        raise ValueError("mine")
    with pytest.raises(SanitizerError) as raised:
        bug_and_error()
    assert str(raised.value.__cause__) == "mine"


def test_contexts_within_one_another():
    with sanitize() as outer:
        with pytest.raises(SanitizerError), sanitize():
            kernels.reads_one_too_many[(2,)](x10, torch.zeros(10), 10, BLOCK=8)
        assert outer.findings == []
        kernels.add[(3,)](x10, x10, torch.empty(10), 10, BLOCK=4)


def test_afterwards_nothing_is_checked_and_nothing_is_changed():
    names = [n for n in dir(interpreter.InterpreterBuilder) if n.startswith("create_")]
    before = [getattr(interpreter.InterpreterBuilder, n) for n in names]
    with sanitize():
        pass
    assert [getattr(interpreter.InterpreterBuilder, n) for n in names] == before


def test_operations_give_the_same_bits():
    x, w = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    expected = ops.conv2d(Tensor(x), Tensor(w), padding=1).data
    with sanitize():
        assert torch.equal(ops.conv2d(Tensor(x), Tensor(w), padding=1).data, expected)


def test_compiled_kernels_are_refused(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="set TRITON_INTERPRET=1"), sanitize():
        pytest.fail("went on")
