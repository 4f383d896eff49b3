"""The list of words to avoid: what it finds in names, texts and pages, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import ROOT, files, uses

GENERATED = {"algorithms.md", "config.md", "metrics.md", "models.md"}


def used(folder: Path, name: str, text: str) -> list[tuple[int, str]]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [(use.line, use.text) for use in uses(path, folder)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("played = 1", [(1, "played")]),
        ("class TaskPlayer:\n    def play_task(self, reply): ...", [(1, "TaskPlayer"), (2, "play_task"), (2, "reply")]),
        ("self._found = 1", [(1, "_found")]),
        ("for said in x:\n    pass", [(1, "said")]),
        ("import a as crew", [(1, "crew")]),
        ("x = 1  # nobody waits", [(1, "nobody")]),
        ('"""One line.\n\nIt plays a task."""', [(3, "plays")]),
        ("raise E(f'the {x} replies')", [(1, "replies")]),
        ("x = {\n    1: 2  # fmt: skip\n}", [(2, "fmt: skip")]),
        ("# as in the seeds, as the original's", [(1, "the seeds"), (1, "the original's")]),
        ("class Gone: ...", [(1, "Gone")]),
    ],
)
def test_a_word_is_found_with_its_line(text: str, expected: list[tuple[int, str]], tmp_path: Path) -> None:
    assert used(tmp_path, "trivium/a.py", text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "display = replay = 1",
        "not_found = file_found = gone = order = 1",
        "def refuse(asked: str, found: str): ...",
        "asked, found = 'a number', f'{x}' if x else 'nothing'",
        "import nobody\nnobody.play()",
        "# the logs/played file, the replayed rollouts, what is found there",
        "x = {'reply': 1}",
    ],
)
def test_other_words_are_left_alone(text: str, tmp_path: Path) -> None:
    assert used(tmp_path, "trivium/a.py", text) == []


def test_a_front_door_may_name_its_origin_and_a_page_is_text(tmp_path: Path) -> None:
    assert used(tmp_path, "trivium/frontdoors/a.py", "# the original") == []
    assert used(tmp_path, "docs/a.md", "# Title\n\nAn explorer plays tasks.") == [(3, "plays")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It reads a file that there is not.", "that there is not"),
        ("The default, where there is none.", "where there is none"),
        ("Take what there is.", "what there is"),
        ("The weights of then, not those of now.", "The weights of then"),
        ("`sandbox: off` does without.", "does without"),
        ("None where the box does not end.", "None where"),
        ("With its adapter off, where it is here.", "where it is here"),
        ("The run goes on.", "goes on"),
        ("A process that comes home late.", "comes home"),
        ("It is made wide and let go of.", "let go of"),
        ("What an adapter says of itself.", "says of itself"),
        ("A list of your own making.", "of your own making"),
        ("It reads no file but this one.", "no file but"),
        ("Hashes, by which the receiver knows them.", "by which the"),
        ("`gspo` in the place of `ppo`.", "in the place of"),
        ("Its adapter began as nothing.", "as nothing"),
        ("An image for the other ranks' sake.", "for the other ranks' sake"),
        ("Collate prompts so.", "so"),
    ],
)
def test_a_riddle_is_found_in_texts_and_pages(text: str, expected: str, tmp_path: Path) -> None:
    assert used(tmp_path, "docs/a.md", text)[0] == (1, expected)
    assert used(tmp_path, "trivium/a.py", f'"""{text}"""')[0] == (1, expected)


def test_other_phrases_are_left_alone(tmp_path: Path) -> None:
    text = "What there is to say; of nowhere; it can do it without a key. So it ends; if so, the next one follows."
    assert used(tmp_path, "docs/a.md", text) == []
    assert used(tmp_path, "trivium/a.py", f'"""{text}"""') == []


def test_the_words_are_avoided() -> None:
    pages = [path for path in (ROOT / "docs").glob("*.md") if path.name not in GENERATED]
    places = [ROOT / "trivium", *pages, ROOT / "README.md", ROOT / "recipes", ROOT / "examples"]
    assert [str(use) for path in files(places) for use in uses(path)] == []
