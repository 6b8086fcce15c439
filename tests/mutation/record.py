"""Verdicts that are kept in the repository, by function: a campaign goes on from them, and CI repeats some.

Of each function the file has the hash of its source, and a word for each of its mutants in the order of the source:
how it was killed and the number of the test that saw it ("failed:12"; "failed:12!" under the sanitizer), "survived:20"
after so many seconds of tests, "not_reached", or "-" of one that is not judged. Functions that change begin anew.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.mutation.campaign import Verdict
from tests.mutation.operators import Mutant
from tests.mutation.reach import source_of

PATH = Path(__file__).with_name("verdicts.json")
NONE = "-"


def by_function(every: Iterable[Mutant]) -> dict[str, list[Mutant]]:
    """Mutants by "file:function", in their order."""
    found: dict[str, list[Mutant]] = {}
    for mutant in every:
        found.setdefault(f"{mutant.file}:{mutant.function}", []).append(mutant)
    return found


def read(path: Path, every: Iterable[Mutant]) -> dict[Mutant, Verdict]:
    """The verdicts in a file that hold for the sources as they are; none where there is no file."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for name, mutants in by_function(every).items():
        kept = stored["functions"].get(name)
        if kept is None or kept["source"] != source_of(name):
            continue
        for mutant, word in zip(mutants, kept["verdicts"].split(), strict=True):
            if word != NONE:
                found[mutant] = _verdict(word, stored["tests"])
    return found


def write(path: Path, every: Iterable[Mutant], verdicts: Mapping[Mutant, Verdict]) -> None:
    """Put verdicts into a file, in place of what it holds; at once, so that nothing half written is read."""
    tests = {test: number for number, test in enumerate(sorted({v.test for v in verdicts.values() if v.test}))}
    functions = {}
    for name, mutants in by_function(every).items():
        words = [_word(verdicts[mutant], tests) if mutant in verdicts else NONE for mutant in mutants]
        if any(word != NONE for word in words):
            functions[name] = {"source": source_of(name), "verdicts": " ".join(words)}
    text = json.dumps({"tests": list(tests), "functions": functions}, indent=0) + "\n"
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _word(verdict: Verdict, tests: Mapping[str, int]) -> str:
    how = verdict.how.replace(" ", "_")
    if verdict.test is None:
        return f"{how}:{verdict.seconds:.0f}" if verdict.how == "survived" else how
    return f"{how}:{tests[verdict.test]}{'!' if verdict.guarded else ''}"


def _verdict(word: str, tests: list[str]) -> Verdict:
    how, _, rest = word.partition(":")
    how = how.replace("_", " ")
    if how in ("survived", "not reached"):
        return Verdict(how, None, float(rest or 0))
    return Verdict(how, tests[int(rest.rstrip("!"))], 0.0, rest.endswith("!"))
