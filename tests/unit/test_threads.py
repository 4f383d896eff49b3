"""User code runs beside the loop and cannot keep the process alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest

from trivium.threads import in_thread


async def test_results_and_errors_come_back() -> None:
    assert await in_thread(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


async def test_a_blocking_function_does_not_block_the_loop() -> None:
    slow = asyncio.create_task(in_thread(lambda: time.sleep(0.2)))
    await asyncio.wait_for(asyncio.sleep(0.01), 0.15)
    assert not slow.done()
    await slow


def test_an_endless_function_does_not_outlive_its_deadline() -> None:
    program = """
import asyncio, time
from trivium.threads import in_thread
def endless():
    while True: time.sleep(0.05)
async def main():
    try:
        async with asyncio.timeout(0.1):
            await in_thread(endless)
    except TimeoutError:
        print("deadline")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (done.stdout.strip(), done.returncode) == ("deadline", 0), done.stderr
