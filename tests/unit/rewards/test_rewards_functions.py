"""The rewards that ship. The golden tests compare the answers that graders read with those of the originals."""

import json
import threading
import time

import pytest
from failing import refused
from pydantic import ValidationError

from trivium.foundation.errors import DataError, MissingPackage, RewardError
from trivium.processes.isolated import Isolated, require
from trivium.rewards.functions import Exact, Format, Gsm8k, MathVerify, ReasoningGym, Regex, last_tag


def test_exact():
    plain, strict = Exact(Exact.Config()), Exact(Exact.Config(strip=False))
    folded = Exact(Exact.Config(casefold=True))
    assert plain("", " 12\n", "12") == 1.0
    assert plain("", "12", 12) == 1.0
    assert plain("", "Yes", "yes") == 0.0
    assert strict("", " 12", "12") == 0.0
    assert folded("", "STRASSE", "straße") == 1.0


def test_partial_credit_is_for_characters_in_their_place_and_less_than_for_the_answer():
    partial = Exact(Exact.Config(partial_credit=0.5))
    assert partial("", "123", "123") == 1.0
    assert partial("", "", "") == 1.0
    assert partial("", "124", "123") == pytest.approx(0.5 * 2 / 3)
    assert partial("", "1234", "123") == pytest.approx(0.5 * 3 / 4)  # what goes on too long is not right
    assert partial("", "23", "123") == 0.0
    assert partial("", "", "123") == 0.0
    with pytest.raises(ValidationError, match="less than 1"):
        Exact.Config(partial_credit=1.0)


def test_regex():
    assert Regex(Regex.Config(pattern=r"\d+"))("", "so 12.") == 1.0
    assert Regex(Regex.Config(pattern=r"\d+", match="full"))("", "so 12.") == 0.0
    assert Regex(Regex.Config(pattern=r"(?s)a.b", match="full"))("", "a\nb") == 1.0
    with pytest.raises(ValidationError, match="not a regular expression"):
        Regex.Config(pattern="(")


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n <answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("x<think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("</think>a<think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion, score):
    assert Format(Format.Config())("", completion) == score


def test_gsm8k_scores():
    strict = Gsm8k(Gsm8k.Config(format_score=0.1))
    flexible = Gsm8k(Gsm8k.Config(method="flexible", format_score=0.1))
    solution = "He sells 18/2 = <<18/2=9>>9 for $1,111 each.\n#### 9,999"
    assert strict("", "#### 42", "42") == flexible("", "so 42", 42) == 1.0
    assert strict("", "#### 9999", solution) == strict("", solution, solution) == 1.0
    assert strict("", "#### 41", "42") == flexible("", "41", "42") == 0.1
    assert strict("", "42", "42") == flexible("", "nothing", "0") == 0.0
    assert strict("", "#### 13.", "13") == 1.0


@pytest.mark.parametrize("tail", ["", " and this agrees with the reasoning above." * 8, "\n" * 400, " so" * 30_000])
def test_gsm8k_reads_the_last_marked_number_whatever_follows(tail):
    strict, flexible = Gsm8k(Gsm8k.Config()), Gsm8k(Gsm8k.Config(method="flexible"))
    assert strict("", f"#### 41\n2+40=42\n#### 42{tail}", "42") == 1.0
    assert strict("", f"#### 41\n#### 42 #### none{tail}", "42") == 1.0
    assert flexible("", f"#### 42, or 43{tail}", "43") == 1.0
    assert strict("", f"####42{tail}", "42") == strict("", f"42{tail}", "42") == 0.0


def test_gsm8k_reads_a_long_completion_in_time_linear_in_its_length():
    """100,000 characters take milliseconds; with backtracking from each place of a run, hours."""
    began = time.process_time()
    for text in (",." * 50_000, "#### ,," * 15_000, "-" * 100_000, "9," * 50_000, "#### -" * 15_000 + "," * 10_000):
        for method in ("strict", "flexible"):
            Gsm8k(Gsm8k.Config(method=method))("", text, "42")
    assert time.process_time() - began < 2


def test_math_verify_off_the_main_thread():
    pytest.importorskip("math_verify")
    reward = MathVerify(MathVerify.Config(cpu_limit_s=4))
    found: list[float] = []
    texts = ("\\boxed{\\sqrt{8}}", "\\boxed{3}")
    thread = threading.Thread(target=lambda: found.extend(reward("", text, "2\\sqrt{2}") for text in texts))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]
    with refused(RewardError, "`answer`", repr("\\boxed{}")):
        reward("", "42", "\\boxed{}")
    with refused(RewardError, "4 CPU seconds"):  # would hold this interpreter for ever
        reward("", "\\boxed{9^{9^{9^{9}}}}", "42")
    assert reward("", "\\boxed{42}", "42") == 1.0


def test_reasoning_gym_scores_as_the_dataset_does():
    gym = pytest.importorskip("reasoning_gym")
    config = {"seed": 3, "size": 5}
    full, tag = ReasoningGym(ReasoningGym.Config()), ReasoningGym(ReasoningGym.Config(extract="tag"))
    for name in ("countdown", "basic_arithmetic"):
        dataset = gym.create_dataset(name, **config)
        entry = json.loads(json.dumps(dataset[1]))
        column = {"dataset": name, "config": config, "entry": entry}
        assert full("", f" {entry['answer']}\n", column) == 1.0
        assert full("", "no idea", column) == dataset.score_answer("no idea", dataset[1])
        assert full("", "no idea", column) < 1.0
        assert tag("", f"<answer>x</answer> so <answer> {entry['answer']} </answer>.", column) == 1.0
        assert tag("", entry["answer"], column) == dataset.score_answer(None, dataset[1])
    with refused(DataError, "reasoning_gym"):
        full("", "1", {"dataset": "countdown"})


def test_last_tag():
    assert last_tag("<answer>1</answer> <answer> 2 </answer> 3", "answer") == "2"
    assert last_tag("<answer>1", "answer") is None
    assert last_tag("1</answer>", "answer") is None


def test_a_missing_package_says_what_to_install():
    with refused(MissingPackage, "pip install 'trivium[math]'"):
        require("no_such_module", "math-verify", "math", "score")


def test_a_child_that_dies_is_an_error_and_is_replaced():
    exits = Isolated("os:_exit", 5)
    for _ in range(2):
        with refused(RewardError, "code 3"):
            exits(status=3)


def test_a_signal_that_no_limit_of_the_call_sent_is_named(tmp_path, monkeypatch):
    source = "import signal, time\ndef f():\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(60)\n"
    (tmp_path / "sets_an_alarm.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with refused(RewardError, "SIGALRM"):
        Isolated("sets_an_alarm:f", 5)()
