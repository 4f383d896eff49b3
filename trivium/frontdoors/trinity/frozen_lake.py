"""The environment of Trinity-RFT's frozen_lake_workflow."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from trivium.foundation.errors import DataError
from trivium.types import Message, Task

_ANSWER = re.compile(r"```(.*?)```", re.DOTALL)
_LAKE = (
    "You walk on a frozen lake, from P to the goal G. Ice (_) carries you, a hole (O) ends the walk. A move off the "
    "grid leaves you where you are. Think, then write one move (Up, Down, Left or Right) between triple backticks, "
    "like ```Right```."
)
_MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


class FrozenLake:
    """A walk over a grid of ice and holes. Reward 1 for reaching the goal.

    A row has `size`, `p` (the probability of ice) and `seed`, or `desc`, the rows of the grid (S start, F ice, H hole,
    G goal).
    """

    def __init__(self, env_max_steps: int = 8, is_slippery: bool = False) -> None:
        """With `is_slippery`, a move goes sideways with probability 2/3."""
        self._most, self._slippery = env_max_steps, is_slippery

    def reset(self, task: Task) -> tuple[Message, ...]:
        columns, self._steps = task.columns, 0
        seed, size = int(columns.get("seed", 0)), int(columns.get("size", 4))
        # One generator for the grid and the slips: all rollouts of a row are on one lake.
        self._random = random.Random(seed)
        desc = columns.get("desc")
        self._grid = [list(row) for row in desc] if desc else lake(size, float(columns.get("p", 0.8)), self._random)
        self._place = _find(self._grid, "S")
        return (Message("system", _LAKE), Message("user", self._shown()))

    def step(self, completion: str) -> tuple[tuple[Message, ...], float, bool]:
        self._steps += 1
        answers = _ANSWER.findall(completion)
        move = _MOVES.get(answers[-1].strip().lower()) if answers else None
        over = self._steps >= self._most
        if move is None:
            text = "There is no move between triple backticks: write Up, Down, Left or Right there.\n"
            return (Message("user", text + self._shown()),), 0.0, over
        if self._slippery:
            move = self._random.choice([move, (move[1], move[0]), (-move[1], -move[0])])
        row, column = self._place[0] + move[0], self._place[1] + move[1]
        if 0 <= row < len(self._grid) and 0 <= column < len(self._grid[0]):
            self._place = row, column
        cell = self._grid[self._place[0]][self._place[1]]
        return (Message("user", self._shown()),), float(cell == "G"), over or cell in "GH"

    def _shown(self) -> str:
        names = {"S": "_", "F": "_", "H": "O", "G": "G"}
        rows = [[names[cell] for cell in row] for row in self._grid]
        rows[self._place[0]][self._place[1]] = "P"
        return "\n".join(" ".join(row) for row in rows)


def lake(size: int, p: float, randomly: random.Random) -> list[list[str]]:
    """Returns a grid whose goal can be reached from its start."""
    for _ in range(10_000):
        cells = [(row, column) for row in range(size) for column in range(size)]
        start, goal = randomly.sample(cells, 2)
        grid = [["F" if randomly.random() < p else "H" for _ in range(size)] for _ in range(size)]
        grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
        if _reaches(grid, start, goal):
            return grid
    raise DataError(f"a frozen lake of size {size}", f"none has a path with p {p}", "raise `p` in the row")


def _reaches(grid: Sequence[Sequence[str]], start: tuple[int, int], goal: tuple[int, int]) -> bool:
    reached, frontier = {start}, [start]
    while frontier:
        row, column = frontier.pop()
        for rows, columns in _MOVES.values():
            cell = row + rows, column + columns
            inside = 0 <= cell[0] < len(grid) and 0 <= cell[1] < len(grid[0])
            if inside and cell not in reached and grid[cell[0]][cell[1]] != "H":
                reached.add(cell)
                frontier.append(cell)
    return goal in reached


def _find(grid: Sequence[Sequence[str]], mark: str) -> tuple[int, int]:
    for row, cells in enumerate(grid):
        if mark in cells:
            return row, cells.index(mark)
    raise DataError(f"a grid with {mark!r}", f"{grid!r:.80}", "correct the column `desc`")
