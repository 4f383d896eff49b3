"""Finds words that the project's language avoids, in names, docstrings, comments, strings and pages.

    python tools/words.py [--places] [PATH ...]

Prints the uses by package, with `--places` each of them and what to write instead; without paths, those of `trivium`.
CONTRIBUTING has the style that the list stands for.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Word:
    """An expression to avoid."""

    pattern: str
    """Regular expression for a whole word, case ignored. For a name: one of its parts (`played`, in `playedTasks` and
    `_played_tasks`); one that begins with `=` is for the whole name, but for underscores at its ends."""
    instead: str
    except_in: str = ""
    """Folder or file where the word has its place."""


EVERYWHERE = (
    Word(r"mend(s|ed|ing)?", "fix, repair"),
    Word(r"nobody|somebody|whoever|everybody", "the component's name"),
    Word(r"obituar(y|ies)", "failure report"),
    Word(r"bur(y|ies|ied|ying)", "reap, remove"),
    Word(r"mourn(s|ed|ing)?", "restart, report failure"),
    Word(r"play(s|ed|ing|er|ers|able)?", "roll out, rollout, episode"),
    Word(r"repl(y|ies)", "completion; response of a server"),
    Word(r"hous(e|es|ed|ing)|departments?", "package, layer"),
    Word(r"likeliest", "top-k, most probable"),
    Word(r"sameness", "resume compatibility"),
)
IN_NAMES = (
    Word(r"tend(s|ed|ing)?", "monitor"),
    Word(r"rooms?", "kind; available, remaining"),
    Word(r"crews?|hubs?|meetings?", "supervisor; weight store; endpoints"),
    Word(r"laws?", "loss metadata"),
    Word(r"seats?", "slot, replica"),
    Word(r"heart", "heartbeat"),
    Word(r"forsaken|forsake", "exchange aborted"),
    Word(r"=(said|told|heard)", "what the variable holds"),
    Word(r"=(found|asked)", "what the variable holds, unless that is this part of an error", except_in="errors.py"),
    Word(r"=(tell|hear|carry)", "send, receive, broadcast"),
    Word(r"=(everywhere|shared_out)", "run_on_all_ranks, scatter"),
    Word(r"=(Gone|Held|Saved|begun|sealing)", "actor died, snapshot, tensor file, staging"),
    Word(r"=(Ends|Order|Pulse|Totals|Gate)", "endpoints, stage spec, heartbeat, denominators, token weight"),
    Word(r"=(Becomes|Only|Idle)", "mapped, restricted, ignored"),
)
IN_TEXT = (
    Word(r"the (seeds|original)('s?)?", "the trainer's name", except_in="frontdoors"),
    Word(r"(the|a|every|each|another|this|its) rooms? (`|of the cat)|rooms of", "kind"),
    Word(r"fmt: (skip|off)", "nothing: the formatter decides"),
)

RIDDLES = (
    Word(r"that there (is|are) not|where there (is|are) none", "the case, with `if`"),
    Word(r"(none|nothing|empty) where", "`if`, and the thing's name"),
    Word(r"where it is here", "`if`, and the place"),
    Word(r"(what|which) there (is|are)(?=[.,;:])", "the thing's name"),
    Word(r"(that|those|what|the \w+) of (now|then)", "current, newest; earlier"),
    Word(r"(does|do|goes|go) without", "what is left out, and its effect"),
    Word(r"(go|goes|going|went) on", "continue"),
    Word(r"(come|comes|coming|came) home", "return, arrive"),
    Word(r"lets? go of", "free, release"),
    Word(r"says of itself|speaks? of the", "describes, names"),
    Word(r"of (your|its|their) own making", "your, its, their"),
    Word(r"no \w+ but(?! pip)", "only"),
    Word(r"by which (a|an|it|the|they)", "a sentence of its own"),
    Word(r"in the place of", "instead of"),
    Word(r"as nothing|for (?:the )?[\w' ]{1,20} sake", "the case, or the reason"),
    Word(r"so(?=[.;])", "the way itself"),
)
"""Turns of phrase that a reader must solve like a riddle."""

KEYS = {
    "reply": "a key of the files under rollouts/, and what a loss over preferences can take its mean over",
}
"""Strings that belong to a file format or an interface, and to which."""

FIELDS = {
    "reply_to": "a label of the HTTP interface",
    "played_groups_per_step": "a field of plan.yaml",
    "replies": "a key of the scripted engine",
}
"""Names, and strings, that belong to a file format or an interface, and to which."""


@dataclass(frozen=True)
class Use:
    """A word that is to be avoided, in a file."""

    path: Path
    line: int
    text: str
    word: Word

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: write {self.word.instead}"


def uses(path: Path, root: Path = ROOT) -> Iterator[Use]:
    """The uses in one Python file, or in a page."""
    source, short = path.read_text(encoding="utf-8"), path.relative_to(root)
    names, texts = parts(source) if path.suffix == ".py" else ([], [(1, source)])
    of_names, of_texts = (words_for(short, (*EVERYWHERE, *more)) for more in (IN_NAMES, IN_TEXT + RIDDLES))
    for line, name in names:
        if name not in FIELDS:
            yield from (Use(short, line, name, word) for word in of_names if in_name(word.pattern, name))
    any_word = any_of(of_texts)
    for line, text in texts:
        for word in of_texts if any_word.search(text) else ():
            for match in any_of((word,)).finditer(text):
                if text not in KEYS | FIELDS:
                    yield Use(short, line + text.count("\n", 0, match.start()), match.group(), word)


def words_for(path: Path, words: Iterable[Word]) -> tuple[Word, ...]:
    return tuple(word for word in words if not word.except_in or word.except_in not in path.parts)


@cache
def any_of(words: tuple[Word, ...]) -> re.Pattern[str]:
    """What finds the first of the words in a text."""
    patterns = "|".join(word.pattern for word in words)
    return re.compile(rf"(?<![\w/.`])(?<!make )({patterns})(?![\w/])", re.IGNORECASE)


@cache
def in_name(pattern: str, name: str) -> bool:
    """Whether a name is, or contains, the word."""
    if pattern.startswith("="):
        return re.fullmatch(pattern[1:], name.strip("_")) is not None
    pieces = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return any(re.fullmatch(pattern, piece, re.IGNORECASE) for piece in pieces)


def parts(source: str) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The names that a file defines, and its texts (docstrings, other strings, comments), each with its line."""
    nodes = [*ast.walk(ast.parse(source))]
    parts_of_errors = {id(name) for node in nodes for name in error_parts(node)}
    names = [entry for node in nodes if id(node) not in parts_of_errors for entry in defined(node)]
    texts = [
        (node.lineno, node.value) for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return sorted(set(names)), sorted(texts)


def error_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The names `asked` and `found` where they hold a text: what was asked, or found, in an error's three parts."""
    if isinstance(node, ast.arg) and node.annotation is not None and ast.unparse(node.annotation) == "str":
        yield from [node] if node.arg in ("asked", "found") else []
    elif isinstance(node, ast.Assign | ast.AugAssign) and is_text(node.value):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        yield from [name for name in names if name.id in ("asked", "found")]


def is_text(value: ast.expr) -> bool:
    """Whether an expression is a literal text, f-strings and choices between texts included."""
    if isinstance(value, ast.IfExp):
        return is_text(value.body) and is_text(value.orelse)
    if isinstance(value, ast.Tuple):
        return all(map(is_text, value.elts))
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def defined(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The names that a node of the syntax tree introduces."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.lineno, node.name
    elif isinstance(node, ast.arg):
        yield node.lineno, node.arg
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.lineno, node.attr
    elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
        yield node.lineno, node.name
    elif isinstance(node, ast.alias) and node.asname:
        yield node.lineno, node.asname


def files(paths: Iterable[Path]) -> list[Path]:
    """The Python files, pages and configs at and below some paths."""
    below = (p for path in paths for p in ([path] if path.is_file() else path.rglob("*")))
    return sorted(path.resolve() for path in below if path.suffix in (".py", ".md", ".yaml") and path.is_file())


def package_of(use: Use) -> str:
    return "/".join(use.path.parts[: min(2, len(use.path.parts) - 1)]) or str(use.path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Words that the project's language avoids.")
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders; trivium if none is given")
    parser.add_argument("--places", action="store_true", help="print every use")
    arguments = parser.parse_args()
    every = [use for path in files(arguments.paths or [ROOT / "trivium"]) for use in uses(path)]
    if arguments.places:
        print("\n".join(map(str, every)))
    by_package: dict[str, Counter[str]] = {}
    for use in every:
        by_package.setdefault(package_of(use), Counter())[use.text.lower()] += 1
    for name, counts in sorted(by_package.items()):
        print(f"{counts.total():6} {name}: {', '.join(f'{text} {n}' for text, n in counts.most_common(12))}")
    print(f"{len(every):6} in all")


if __name__ == "__main__":
    main()
