"""A process that has imported what training needs, and forks a child for each command: a life without its imports.

    python -m tests.trials.warm          answers requests, a JSON object per line, until its standard input is closed
    python -m tests.trials.warm REQUEST  lives one life in this process, where forking is of no use

A request is {"argv": [...], "log": FILE, "timeline": FILE, "die_at": null or a number} and is answered by {"pid": ...};
{"wait": PID} is answered by {"code": ...}, the exit status as subprocess gives it.

A child stands for `python -m minidl ...`: the parent runs no command and no kernel, starts no thread and does not
touch CUDA, so what the child finds is what imports leave, in the state in which they leave it. Two things differ. The
seed by which Python hashes strings is that of the parent, so a trial takes the lives of one run from several parents.
And an exit is `os._exit` after standard output is flushed, as the parent's own end must not be run twice.

Before the command begins, a few functions of minidl are wrapped to note in the timeline where training is: each line is
a time of the monotonic clock and the name of the place that begins, "+saving" and "-saving" around the writing of a
checkpoint, which goes on in a thread, or "file" before an operation on a file of the run. With `die_at` n the child
kills itself before the n-th of those.
"""

import functools
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import minidl.cli
from minidl.training import train

# Imported by commands when they are needed.
MODULES = (
    "matplotlib.backends.backend_agg", "matplotlib.figure", "numpy.random", "PIL.GifImagePlugin", "PIL.PngImagePlugin",
    "safetensors.torch", "scipy.linalg", "sklearn.datasets", "sklearn.linear_model", "sklearn.svm", "threadpoolctl",
    "minidl.data.images", "minidl.data.schema", "minidl.data.vectorizer", "minidl.training.loop.supervised",
)  # fmt: skip
FILE_EVENTS = {"open", "os.chmod", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir"}


def serve():
    """Answer requests from standard input."""
    for name in MODULES:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    answer({"ready": threads == 1, "threads": threads})
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            answer({"code": os.waitstatus_to_exitcode(status)})
        elif "probe" in request:
            answer({"pid": fork(probe)})
        else:
            answer({"pid": fork(functools.partial(live, **request))})


def answer(content):
    print(json.dumps(content), flush=True)


def fork(run):
    """The number of a new process that calls `run` and exits with what it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = run()
    except BaseException:  # noqa: BLE001 (nothing may go on into the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def probe():
    """0 where a forked child can use the device: what imports do must not have touched CUDA."""
    import torch

    from minidl.runtime import launch

    if not launch.INTERPRETED:
        torch.zeros(1, device="cuda").item()
    return 0


def live(argv, log, timeline, die_at=None):
    """Run a command to its end; its exit status."""
    for number, stream in ((0, os.open(os.devnull, os.O_RDONLY)), (1, opened(log)), (2, opened(log))):
        os.dup2(stream, number)
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)  # a Ctrl-C is for the one who makes the trials
    note = notes(opened(timeline))
    watch(note)
    watch_files(argv, note, die_at)
    note("start-up")
    sys.argv = ["minidl", *argv]
    code = 0
    try:
        minidl.cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    note("end")
    return code


def opened(path):
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def notes(stream):
    """What writes a place into a timeline: in one call, so that a line is there as a whole or not at all."""
    return lambda place: os.write(stream, f"{time.monotonic():.6f} {place}\n".encode())


def watch(note):
    """Wrap the functions that lead from place to place."""
    from minidl.training.loop import adversaries, epochs, gan
    from minidl.training.run_folder import checkpoints

    for cls in (epochs.Trainer, gan.GanTrainer):
        around(cls, "_epoch", note, "steps", "end of an epoch")
        around(cls, "run", note, None, "report")
    around(epochs.Trainer, "_end_epoch", note, "validation", "end of an epoch")
    around(adversaries.Adversaries, "calibrate", note, "validation", None)
    around(gan.samples, "write_grid", note, None, "end of an epoch")
    around(checkpoints.Checkpoints, "_write", note, "+saving", "-saving")
    around(train, "_fit", note, "set-up", None)


def around(owner, name, note, before, after):
    function = getattr(owner, name)

    @functools.wraps(function)
    def noted(*args, **options):
        if before:
            note(before)
        result = function(*args, **options)
        if after:
            note(after)
        return result

    setattr(owner, name, noted)


def watch_files(argv, note, die_at):
    """Note each operation on a file of the run, and die before the one that is numbered so."""
    run = argv[argv.index("--out") + 1]
    lock, count = threading.Lock(), 0

    def hook(event, args):
        nonlocal count
        if event not in FILE_EVENTS or not args or not str(args[0]).startswith(run):
            return
        with lock:
            count += 1
            note("file")
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(live(**json.loads(sys.argv[1])))
    serve()
