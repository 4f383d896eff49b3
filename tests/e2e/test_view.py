"""`trivium view` in a real browser and over HTTP: what the page shows is what the run recorded, and nothing of what a
model wrote is anything but text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Generator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from browser import Page, browser, chromium

from tests.processes import Forked, commands
from tests.waiting import eventually
from trivium.buffers.journal import write_groups
from trivium.config import load_config
from trivium.inspection.report import write_report
from trivium.inspection.rollouts import read_rollouts
from trivium.runtime.launch import run
from trivium.types import Failure, Group, Media, Message, StopReason, Task, Trajectory, Turn

RECIPE = Path(__file__).parents[2] / "recipes" / "arithmetic.yaml"
SHORT = [
    "stages.0.schedule.steps=2",
    "stages.0.schedule.groups_per_step=8",
    "stages.1.schedule.steps=3",
    "stages.1.schedule.groups_per_step=4",
    "stages.1.algorithm.mini_batches=2",
    "tasks.test.count=4",
    "model.hidden=16",
    "model.layers=1",
    "model.mlp=16",
    "rewards=[{kind: regex, pattern: '[0-4]'}]",
    "monitors=[{kind: jsonl}]",
]
HOSTILE = "<script>window.stolen = 1</script><img src=x onerror='window.stolen = 1'>"
PICTURE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9fe92ef"
    "0000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, of a few steps."""
    path = tmp_path_factory.mktemp("view") / "demo"
    run(load_config(RECIPE, [f"run.dir={path}", *SHORT]))
    return path


@pytest.fixture(scope="module")
def hostile(demo: Path) -> Path:
    """A run whose tasks and completions are HTML, with a picture, a failure, and turns of an environment."""
    path = demo.parent / "hostile"
    for name in ("config.yaml", "metrics.jsonl", "model"):
        path.mkdir(exist_ok=True)
        (path / name).symlink_to(demo / name)
    prompt, own, later = np.array([1, 2], np.int32), np.array([3, 4], np.int32), np.array([1, 2, 3, 4, 5], np.int32)

    def turn(context: Any, reason: StopReason) -> Turn:
        numbers = np.zeros(2, np.float32), np.zeros(2, np.int32)
        picture = Media("image/png", PICTURE, (1, 2))
        return Turn(context, own, *numbers, reason, HOSTILE, (picture,))

    turns = turn(prompt, StopReason.EOS), turn(later, StopReason.LENGTH)
    task = Task(HOSTILE, (Message("user", HOSTILE, (Media("image/png", PICTURE),)),), {"note": HOSTILE})
    members = (
        Trajectory(0, turns, {HOSTILE: 1.0}),
        Trajectory(1, turns[:1], failure=Failure("workflow", "Error", HOSTILE)),
    )
    write_groups(path / "rollouts" / "stage-1" / "step-000001.msgpack", [Group(0, task, members, dropped=HOSTILE)])
    return path


Start = Callable[..., str]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> Generator[Start]:
    """Starts `trivium view` over runs and gives the address that it prints; each must end by itself when it is told."""
    started: list[Forked] = []
    with commands(tmp_path_factory.mktemp("commands")) as start:

        def address(*runs: Path) -> str:
            server = start("view", "view", *map(str, runs))
            started.append(server)
            eventually(lambda: "http://" in server.text, 120, lambda: server.text, server)
            return re.findall(r"http://\S+", server.text)[0]

        yield address
        for server in started:
            os.kill(server.pid, signal.SIGTERM)
            assert server.wait(120) == 0, server.text


@pytest.fixture(scope="module")
def url(view: Start, demo: Path, hostile: Path) -> str:
    return view(demo, hostile)


@pytest.fixture(scope="module")
def page() -> Generator[Page]:
    if chromium() is None and "REQUIRE_CHROMIUM" not in os.environ:
        pytest.skip("no chromium (Debian: apt-get install chromium)")
    with browser() as opened:
        opened.resize(1440, 900)
        yield opened


def test_the_page_shows_the_advantage_that_the_journal_has(url: str, page: Page, demo: Path) -> None:
    rollout = next(each for each in read_rollouts(demo, step=4) if each.sequences[0].columns["advantages"].any())
    (sequence,), group = rollout.sequences, rollout.group
    place, at = f"1.{group.slot}.{group.attempt}", int(np.flatnonzero(sequence.response_mask)[0])
    page.open(f"{url}#/rollouts?run=0&step=4&group={place}")
    page.wait(f"document.querySelectorAll('.member').length === {len(group.rollouts)}")
    assert page.evaluate("document.querySelector('.groups a[aria-current]').dataset.group") == place
    token = f"document.querySelector('.member[data-index=\"{rollout.trajectory.index}\"] .t')"
    x, y = page.evaluate(f"(({{x, y}}) => [x + 3, y + 3])({token}.getBoundingClientRect())")
    page.move(x, y)
    shown = "document.querySelector('#tip [data-value=advantages] td')"
    advantage = float(page.wait(f"!document.getElementById('tip').hidden && {shown}?.textContent"))
    assert np.float32(advantage) == sequence.columns["advantages"][at]
    members = [member.reward for member in group.trajectories]
    expected = (rollout.trajectory.reward - np.mean(members)) / (np.std(members, ddof=1) + 1e-6)
    assert advantage == pytest.approx(expected, rel=1e-4)  # as the journal's rewards have it
    # The address of a token can be shared: it opens on the same one.
    page.evaluate(f"{token}.click()")
    shared = page.evaluate("location.href")
    assert f"index={rollout.trajectory.index}&token=0.{at}" in shared
    page.open("about:blank")
    page.open(shared)
    row = page.wait("document.querySelector('.member .facts [data-value=advantages] td')?.textContent")
    assert np.float32(row) == sequence.columns["advantages"][at]
    assert page.evaluate("document.querySelectorAll('.member').length") == 1
    assert page.problems == []


def test_an_axis_magnifies_no_rounding_errors_and_gives_a_constant_its_surroundings(url: str, page: Page) -> None:
    page.open(f"{url}#/overview")
    module = "import(new URL('pages/overview.js', document.baseURI))"
    page.evaluate(f"{module}.then(module => Object.assign(window, {{ ...module }})); 0")
    page.wait("typeof window.axisRange === 'function'")
    steps = page.evaluate(
        "[window.stepRange([0], 0, 100), window.stepRange([5], 0, 10), window.stepRange([1, 9], 2, 8)]"
    )
    assert steps == [[0, 1], [4, 6], [2, 8]]

    def ends(least: float, most: float, floor: float = 1e-10) -> list[float]:
        return json.loads(page.evaluate(f"JSON.stringify(window.axisRange({least}, {most}, {floor}))"))

    assert ends(0, 0) == ends(-1e-13, 3e-13) == [0, 1]
    assert ends(0, 0, 0) == ends(1e-7, 2e-7, 1e-6) == [0, 1]  # a divergence in nats below its floor
    assert ends(2, 2 + 1e-7, 1e-6) == [1, 3 + 1.5e-7]
    assert ends(0.25, 0.25) == [0.125, 0.375]
    assert ends(-2, -2) == [-3, -1]
    low, high = ends(1e-7, 2e-7)  # a learning rate
    assert 0 <= low <= 1e-7 < 2e-7 <= high < 4e-7
    assert page.problems == []


RUNS = "short", "longer", "the longest of them", "another seed", "another learning rate"


@pytest.fixture(scope="module")
def five(view: Start, demo: Path) -> str:
    """The address of five runs: the demo's metrics under other configs, whose first stages end at other steps."""
    paths = [demo.parent / name for name in RUNS]
    for number, path in enumerate(paths):
        path.mkdir()
        for item in demo.iterdir():
            if item.name not in ("config.yaml", "metrics.jsonl"):
                (path / item.name).symlink_to(item)
        config = yaml.safe_load((demo / "config.yaml").read_text())
        config["run"]["seed"] += number == 3
        config["stages"][0]["schedule"]["steps"] = 1 + number % 3
        config["stages"][1]["train"]["optimizer"]["lr"] *= 2 if number == 4 else 1
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        rows = [json.loads(line) for line in (demo / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {key: row[key] + number / 10 for key in ("train/entropy",) if key in row} for row in rows]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return view(*paths)


def test_five_runs_begin_with_their_curves_and_each_can_be_switched_off(five: str, page: Page) -> None:
    page.open("about:blank")
    page.open(f"{five}#/overview")
    legend = "document.querySelector('figure[data-title=Entropy] .legend')"
    page.wait(f"document.querySelector('figure canvas') && {legend}?.children.length === 5")
    names = page.evaluate(f"[...{legend}.children].map((each) => each.textContent)")
    assert [name.rsplit(" ", 2)[0] for name in names] == [*RUNS]
    # Curves, then what the configs differ in, then the prose, folded.
    places = (
        "['figure', '.differences', '.card'].map((each) => document.querySelector(each).getBoundingClientRect().top)"
    )
    tops = page.evaluate(places)
    assert tops == sorted(tops)
    assert page.evaluate("document.querySelectorAll('details.card:not([open])').length") == 5
    assert tops[0] < 200
    rows = page.evaluate(
        "[...document.querySelectorAll('.differences tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    values = {name: cells for name, *cells in rows}
    assert values[""] == [*RUNS]
    assert values["stages.0.schedule.steps"] == ["1", "2", "3", "1", "2"]
    assert values["run.seed"][3] not in {*values["run.seed"][:3], values["run.seed"][4]}
    assert values.keys() == {"", "run.seed", "stages.0.schedule.steps", "stages.1.train.optimizer.lr"}
    page.evaluate("document.querySelectorAll('.switches input')[1].click()")
    page.wait(f"{legend}.children.length === 4")
    assert "hide=1" in page.evaluate("location.hash")
    assert page.evaluate(f"{legend}.textContent.includes('longer')") is False
    page.open("about:blank")
    page.open(f"{five}#/overview?hide=1.2")
    page.wait(f"{legend}?.children.length === 3")
    assert page.problems == []


def test_labels_of_several_runs_do_not_overprint(five: str, page: Page) -> None:
    page.resize(300, 800)  # a step is narrower than a label
    page.open("about:blank")
    page.open(f"{five}#/overview?metric=train/entropy")
    page.wait("document.querySelector('figure canvas')")
    # What is written into the charts, with its place; the next theme draws them again.
    page.evaluate(
        "window.texts = []; const write = CanvasRenderingContext2D.prototype.fillText;"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) { window.texts.push([this.canvas.closest("
        "'figure').dataset.title, text, x, y, this.measureText(text).width]); write.call(this, text, x, y); }; 0"
    )
    page.press("t")
    page.wait("window.texts.some(([title, text]) => title === 'train/entropy' && text.startsWith('stage'))")
    written = page.evaluate("window.texts")
    page.press("t")
    page.resize(1440, 900)
    labels = sorted({tuple(each[1:]) for each in written if each[0] == "train/entropy" and each[1].startswith("stage")})
    assert len(labels) == 3  # one for each step at which some run's stage begins
    assert len({y for _, _, y, _ in labels}) > 1
    for at, (_, x, y, width) in enumerate(labels):
        for _, other_x, other_y, other_width in labels[:at]:
            assert abs(y - other_y) >= 10 or x + width <= other_x or other_x + other_width <= x


# Kinds of colour vision as matrices on linear RGB: Machado et al. 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def seen(colour: str, vision: str) -> Any:
    """CIE Lab of a colour as people with this vision see it."""
    rgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(TO_XYZ @ np.clip(np.array(VISION[vision]) @ linear, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest_two(colours: list[str]) -> float:
    """The smallest distance of two of the colours, over the kinds of vision."""
    pairs = [(a, b, vision) for a, b in combinations(colours, 2) for vision in VISION]
    return min(float(np.linalg.norm(seen(a, vision) - seen(b, vision))) for a, b, vision in pairs)


def test_colours_of_curves_differ_for_the_colour_blind_as_well(url: str, page: Page) -> None:
    assert nearest_two(["#c2410c", "#b45309"]) < 2  # two kinds of orange are one
    source = httpx.get(f"{url}pages/lib.js", timeout=60).text
    palettes = re.findall(r'(?:light|dark): \["(#[^\]]+)"\]', source)
    assert len(palettes) == 2
    for palette in palettes:
        colours = palette.split('", "')
        assert nearest_two(colours[:5]) > 30
        assert nearest_two(colours) > 20


@pytest.fixture(scope="module")
def large(view: Start, demo: Path) -> str:
    """The address of a run with 10,000 rollouts in a step, in groups of 8, and of 64 in the next one."""
    path = demo.parent / "large"
    path.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "model"):
        (path / name).symlink_to(demo / name)
    (recorded,) = [next(iter(read_rollouts(demo, step=4)))]
    turns = recorded.trajectory.turns

    def group(slot: int, size: int) -> Group:
        members = tuple(Trajectory(n, turns, {"exact": float(n * 7 % size < slot % size)}) for n in range(size))
        return Group(slot, Task(f"task-{slot:04d} with a long name", (Message("user", f"{slot}?"),)), members)

    for step, groups in ((4, [group(slot, 8) for slot in range(1250)]), (5, [group(5000 + n, 64) for n in range(8)])):
        write_groups(path / "rollouts" / "stage-1" / f"step-{step:06d}.msgpack", groups)
    return view(path)


def test_ten_thousand_rollouts_of_a_step_stay_fluent(large: str, page: Page) -> None:
    page.open("about:blank")
    page.open(f"{large}#/rollouts?run=0&step=4&sort=reward")
    page.wait("document.querySelectorAll('.member').length === 8")
    assert page.evaluate("document.querySelector('.pager').textContent").startswith("‹ previous1–50 of 1250")
    assert page.evaluate("document.querySelectorAll('.groups li').length") == 50
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    # What a key costs the page itself, without the server's part.
    began = page.evaluate("performance.now()")
    for key, shown in (("n", "51–100"), ("n", "101–150"), ("p", "51–100")):
        page.press(key)
        page.wait(f"document.querySelector('.pager').textContent.includes('{shown} of 1250')")
    assert page.evaluate("performance.now()") - began < 15_000  # a tenth of a second each on an idle machine
    page.press("j")
    page.wait("document.querySelectorAll('.groups a')[1].hasAttribute('aria-current')")
    assert page.problems == []


def test_bars_of_a_large_group_leave_room_for_its_task(large: str, page: Page) -> None:
    page.open("about:blank")
    page.open(f"{large}#/rollouts?run=0&step=5")
    page.wait("document.querySelectorAll('.member').length === 32")
    task, bars = (
        page.evaluate(f"document.querySelector('.groups {each}').getBoundingClientRect().width")
        for each in (".task", ".strip")
    )
    assert task > 150
    assert bars <= 100
    heights = page.evaluate(
        "[...document.querySelectorAll('.groups a')[7].querySelectorAll('.strip i')].map((bar) => bar.offsetHeight)"
    )
    assert len(heights) == 24
    assert heights == sorted(heights, reverse=True)
    page.evaluate("[...document.querySelectorAll('.detail button')].at(-1).click()")
    page.wait("document.querySelectorAll('.member').length === 64")
    assert page.problems == []


def test_a_narrow_screen_keeps_the_navigation(five: str, page: Page) -> None:
    page.resize(420, 800)
    try:
        for view in ("overview", "rollouts", "timeline", "compare", "tasks"):
            page.open("about:blank")
            page.open(f"{five}#/{view}")
            page.wait(f"document.querySelector('#tabs a[aria-current]')?.textContent.toLowerCase() === '{view}'")
            page.wait("document.querySelector('main').children.length && !document.querySelector('[aria-busy]')")
            rights = page.evaluate(
                "[...document.querySelectorAll('#tabs a, header button')].map((it) => it.getBoundingClientRect().right)"
            )
            assert len(rights) == 7
            assert max(rights) <= 420
            assert page.evaluate("document.documentElement.scrollWidth") <= 420
    finally:
        page.resize(1440, 900)
    assert page.problems == []


def test_the_table_of_tasks_leads_to_their_rollouts(url: str, page: Page, demo: Path) -> None:
    page.open("about:blank")
    page.open(f"{url}#/tasks?run=0")
    page.wait("document.querySelector('table.tasks td')")
    tasks = {rollout.group.task.task_id for rollout in read_rollouts(demo)}
    column = "[...document.querySelectorAll('table.tasks tr:has(td)')].map((row) => row.cells[{}].textContent)"
    assert len(page.evaluate(column.format(0))) == len(tasks)
    for _ in range(2):  # descending, then ascending
        page.evaluate("[...document.querySelectorAll('table.tasks th button')][2].click()")
        page.wait("document.querySelector('table.tasks th[aria-sort]')")
    page.wait("document.querySelector('table.tasks th[aria-sort=ascending]')")
    rates = [int(each.removesuffix(" %")) for each in page.evaluate(column.format(2))]
    assert rates == sorted(rates)
    task, last = page.evaluate(f"[{column.format(0)}.at(-1), {column.format(2)}.at(-1)]")
    page.evaluate("[...document.querySelectorAll('table.tasks tr')].at(-1).cells[2].firstChild.click()")
    page.wait("document.querySelector('.member')")
    assert page.evaluate("document.querySelector('.detail h2').firstChild.textContent") == task.removesuffix(" train")
    rewards = page.evaluate("[...document.querySelectorAll('.member .reward')].map((each) => Number(each.textContent))")
    assert f"{100 * np.mean([reward >= 1 for reward in rewards]):.0f} %" == last
    assert page.problems == []


def test_every_view_opens_in_both_themes_and_by_the_keyboard(url: str, page: Page, demo: Path) -> None:
    rows = [json.loads(line) for line in (demo / "metrics.jsonl").read_text().splitlines()]
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row][-1]
    legend = "document.querySelector('figure .legend')"
    for theme in ("dark", "light"):
        page.prefer(theme)
        page.open("about:blank")
        page.open(f"{url}#/overview")
        page.wait(f"document.querySelector('figure canvas') && {legend}.textContent.includes('{reward:.4g}')")
        assert page.evaluate("document.documentElement.dataset.theme") == theme
        page.evaluate("document.querySelector('.card').open = true")
        page.wait("document.querySelector('.card pre')?.textContent.includes('minimise')")
    assert page.evaluate("performance.getEntriesByName('first-contentful-paint').length") == 1
    page.press("2")
    page.wait("document.querySelector('.member .t')")
    assert page.evaluate("document.querySelector('[name=step]').value") == "5"
    page.press(",")
    chosen = "document.querySelector('.groups[data-step=\"4\"] a[aria-current]')?.dataset.group"
    first = page.wait(chosen)
    page.press("j")
    page.wait(f"{chosen} && {chosen} !== '{first}'")
    page.press("3")
    page.wait("document.querySelector('table.plain')?.textContent.includes('trainer')")
    page.press("+")
    page.press("4")
    page.wait("document.querySelector('.compare')?.textContent.includes('has no rollout of the task')")
    page.open(f"{url}#/compare?run=0&other=0&step=3&task={tasks_of(demo, 3)[0]}")
    page.wait("document.querySelectorAll('.compare .member').length === 2 || document.querySelector('.compare button')")
    page.press("?")
    page.wait("document.getElementById('help').open")
    assert page.problems == []


def tasks_of(run_dir: Path, step: int) -> list[str]:
    return [rollout.group.task.task_id.replace("+", "%2B") for rollout in read_rollouts(run_dir, step=step)]


def test_what_a_model_wrote_is_text(url: str, page: Page) -> None:
    page.open("about:blank")
    page.open(f"{url}#/rollouts?run=1")
    page.wait("document.querySelectorAll('.member').length === 2 && document.querySelector('.detail img')?.complete")
    text = page.evaluate("document.body.textContent")
    assert text.count(HOSTILE) >= 6  # task, prompt, column, component, failure, why it was dropped
    assert page.evaluate("window.stolen === undefined")
    assert page.evaluate("[...document.images].every((image) => image.naturalWidth === 1)")
    assert "environment" in page.evaluate("document.querySelector('.member .transcript').textContent")
    page.open("about:blank")
    page.open(f"{url}#/compare?run=1&other=1")
    page.wait("document.querySelectorAll('.compare .member').length === 2")
    assert page.evaluate("window.stolen === undefined")
    assert page.problems == []


def test_a_report_is_drawn_from_its_file_alone(hostile: Path, page: Page, tmp_path: Path) -> None:
    report = write_report(hostile, tmp_path / "report.html")
    page.open("about:blank")
    page.open(report.as_uri())
    page.wait("document.querySelectorAll('figure canvas').length > 5")
    assert page.evaluate("document.querySelectorAll('.member').length") == 2
    page.wait("document.querySelector('.verdict')?.textContent.includes('bound by')")
    assert page.evaluate("document.body.textContent").count(HOSTILE) >= 3  # two tasks and a failure
    assert page.evaluate("window.stolen === undefined")
    token = "document.querySelector('.own .t')"
    page.evaluate(f"{token}.scrollIntoView({{ block: 'center' }})")
    page.wait("[...document.images].some((image) => image.naturalWidth === 1)")
    x, y = page.evaluate(f"(({{x, y}}) => [x + 3, y + 3])({token}.getBoundingClientRect())")
    page.move(x, y)
    page.wait("!document.getElementById('tip').hidden")
    assert page.evaluate("document.querySelector('#tip [data-value=log_prob] td').textContent") == "0"
    assert page.problems == []


def test_participants_and_sequences_that_start_later_are_shown_with_the_reason(
    view: Start, hostile: Path, page: Page
) -> None:
    def turn(context: list[int], own: list[int], participant: str, reward: float) -> Turn:
        numbers = np.zeros(len(own), np.float32), np.zeros(len(own), np.int32)
        tokens = np.array(context, np.int32), np.array(own, np.int32)
        return Turn(*tokens, *numbers, StopReason.EOS, "text", reward=reward, participant=participant)

    path = hostile.parent / "forked"
    path.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "model"):
        (path / name).symlink_to(hostile / name)
    turns = (
        turn([1, 2], [3, 4], "proposer", 0.0),
        turn([1, 5], [6, 7], "solver", 0.25),
        turn([1, 5, 6, 8, 9], [2], "solver", 0.5),  # the completion of turn 2 was changed
    )
    whole = Group(0, Task("game", (Message("user", "go"),)), (Trajectory(0, turns, {"solver": 1.0}),))
    write_groups(path / "rollouts" / "stage-1" / "step-000001.msgpack", [whole])
    page.open("about:blank")
    page.open(f"{view(path)}#/rollouts?run=0")
    page.wait("document.querySelectorAll('.transcript p.fork').length === 2")
    member = page.evaluate("document.querySelector('.member').textContent")
    for text in (
        "3 turns in 3 sequences",
        "proposer 1 of 3 turns",
        "solver 2 of 3 turns, reward of steps 0.75",
        "turn 2 · solver",
    ):
        assert text in member
    first, second = page.evaluate("[...document.querySelectorAll('.transcript p.fork')].map((p) => p.textContent)")
    assert "another sequence, of solver" in first
    assert "token 1 is" in first
    assert "the completion of turn 2 was changed; token 3 is" in second
    assert page.evaluate("[...document.querySelectorAll('.t.fork')].map((token) => token.place)") == [[1, 1], [2, 3]]
    assert page.problems == []


def test_only_this_machine_with_the_token_reads_and_only_files_of_the_run(url: str, hostile: Path) -> None:
    base, token = url.rstrip("/").rsplit("/", 1)
    with httpx.Client(timeout=60) as client:
        assert client.get(url).status_code == 200
        assert "script-src 'self'" in client.get(url).headers["content-security-policy"]
        swapped = ("y" if token.startswith("x") else "x") + token[1:]  # one random token in 64 begins with any letter
        for other in ("", swapped, token[:-1], f"{token}x"):
            assert client.get(f"{base}/{other}/api/runs").status_code == 404
        assert client.get(f"{base}/api/runs").status_code == 404
        for host in ("evil.example", f"evil.example:{httpx.URL(url).port}", "127.0.0.1.evil.example", ""):
            assert client.get(f"{url}api/runs", headers={"host": host}).status_code in (400, 403)
        assert client.get(f"{url}api/runs", headers={"host": "localhost:1"}).status_code == 200  # an ssh tunnel
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert client.request(method, f"{url}api/runs").status_code == 405
        for path in ("pages/../page_server.py", "pages/%2e%2e/page_server.py", "pages/uPlot.LICENSE", "pages/x.js"):
            assert client.get(url + path).status_code == 404
        image = client.get(f"{url}media/1/{hashlib.sha256(PICTURE).hexdigest()}")
        assert (image.content, image.headers["content-type"]) == (PICTURE, "image/png")
        for name in ("0" * 64, "../config.yaml", "%2e%2e%2fconfig.yaml", "g" * 64, str(hostile)):
            assert client.get(f"{url}media/1/{name}").status_code in (400, 404)
        assert [client.get(f"{url}trace/{run}.json").status_code for run in (-1, 0, 1, 2)] == [404, 200, 200, 404]
        refused = client.get(f"{url}api/groups", params={"run": 7, "step": 1})
        assert (refused.status_code, refused.json()["found"]) == (400, "it has 2")
        assert client.get(f"{url}api/groups", params={"run": 0, "step": 99}).status_code == 400


def test_groups_are_sorted_filtered_searched_and_paged(url: str) -> None:
    with httpx.Client(timeout=60) as client:

        def groups(**query: Any) -> dict[str, Any]:
            answer = client.get(f"{url}api/groups", params={"run": 0, "step": 4, **query})
            assert answer.status_code == 200, answer.text
            return answer.json()

        every = groups()["rows"]
        assert len(every) == 4
        lengths = [sum(member["tokens"] for member in row["members"]) for row in groups(sort="length")["rows"]]
        assert lengths == sorted(lengths, reverse=True)
        assert groups(sort="length", descending=False)["rows"][0]["members"] is not None
        task = every[2]["task"]
        assert [row["task"] for row in groups(text=task)["rows"]].count(task) == 1
        assert groups(text="no such text")["matching"] == 0
        page = groups(first=1, count=2)
        assert ([row["slot"] for row in page["rows"]], page["total"]) == ([row["slot"] for row in every[1:3]], 4)
        mixed, equal = groups(show="mixed")["matching"], groups(show="equal")["matching"]
        assert mixed + equal == 4
        assert groups(least=2)["matching"] == 0
        failed = groups(run=1, step=1, show="failed")["rows"]
        assert failed[0]["members"][1]["failure"].startswith("workflow: Error: <script>")
        chrome = client.get(f"{url}trace/0.json")
        assert chrome.headers["content-disposition"].startswith("attachment")
        spans = [event for event in chrome.json()["traceEvents"] if event["ph"] == "X"]
        assert {"wait", "train", "update/policy", "sync", "checkpoint", "generate", "evaluate"} <= {
            event["name"] for event in spans
        }


def test_metrics_that_a_run_adds_are_asked_for_alone(view: Start, demo: Path, tmp_path: Path) -> None:
    lines = (demo / "metrics.jsonl").read_text().splitlines(keepends=True)
    going = tmp_path / "going"
    going.mkdir()
    (going / "config.yaml").write_bytes((demo / "config.yaml").read_bytes())
    metrics = going / "metrics.jsonl"
    metrics.write_text("".join(lines[:2]) + lines[2][:20])  # half a row is not one yet
    base = view(going)
    with httpx.Client(timeout=60) as client:

        def curves(after: int) -> dict[str, Any]:
            return client.get(f"{base}api/curves", params={"run": 0, "keys": "train/version", "after": after}).json()

        first = curves(0)
        assert (first["rows"], first["finished"], len(first["curves"]["train/version"]["steps"])) == (2, False, 2)
        metrics.write_text("".join(lines[:3]))
        added = curves(2)
        assert (added["rows"], added["generation"]) == (3, first["generation"])
        metrics.write_text(lines[0])  # a resumed run cuts the file to what its checkpoint knows
        assert (curves(0)["rows"], curves(0)["generation"]) == (1, first["generation"] + 1)
